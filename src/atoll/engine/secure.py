"""One round's sums under secure aggregation: who is lost when, in which groups, and what the sums say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from atoll.core.messages import Task, Update, stack
from atoll.core.seeds import generator
from atoll.engine.players import stage_for
from atoll.secagg.encoding import Encoding
from atoll.secagg.scheme import Outcome, Session
from atoll.train.job import Job
from atoll.train.secure import Largest, Secure, Sum, from_sum, length, rounding_of, to_integers
from atoll.train.trainer import Report


class Added(NamedTuple):
    """What the server knows of a round."""

    rows: Update | None
    """The mean of each group, stacked; None if too few groups have one."""
    clients: frozenset[int]
    """Whose updates are in them."""
    samples: float
    loss: float
    bytes_up: int
    bytes_down: int
    upload: int
    """What one client sent, on average."""
    row: dict[str, Any]
    """What the metrics say of it."""


class Sent(NamedTuple):
    """A client's update and what its report says of it."""

    update: Update
    report: Report


def fates(job: Job, asked: Sequence[Task], arrived: Sequence[Task]) -> dict[int, str]:
    """The step before which each lost client falls silent: those who never arrive, and some of the others by chance."""
    secure = job.secure
    assert secure is not None
    rng = generator(job.seed, "secagg lost", asked[0].attempt)
    there = {task.client for task in arrived}
    steps, early = secure.scheme.steps, secure.scheme.counts_from + 1
    found = {}
    for client in sorted(task.client for task in asked):
        chance, place = rng.random(2).tolist()
        if client not in there:
            found[client] = steps[int(place * early)]
        elif chance < secure.settings.lost:
            found[client] = steps[int(place * len(steps))]
    return found


def counted(job: Job, tasks: Sequence[Task], lost: Mapping[int, str]) -> tuple[Task, ...]:
    """The tasks of clients that send their vector before they are lost, if ever."""
    secure = job.secure
    assert secure is not None
    early = secure.scheme.steps[: secure.scheme.counts_from + 1]
    return tuple(task for task in tasks if lost.get(task.client) not in early)


def add_in_secret(
    job: Job, run: str, params_D: Tensor, asked: Sequence[Task], sent: Mapping[int, Sent], lost: Mapping[int, str]
) -> Added:
    """Play the sessions of a round; `sent` holds the updates of those who come as far as to send one."""
    secure = job.secure
    assert secure is not None
    attempt, share = asked[0].attempt, max(task.share for task in asked)
    largest = Largest(share * job.federation.max_samples, job.federation.max_samples)
    model = hashlib.sha256(params_D.contiguous().numpy().data).digest()
    before = secure.scheme.steps[secure.scheme.counts_from]
    silent = {client: before for client in (task.client for task in asked) if client not in sent} | dict(lost)
    sums: list[Sum] = []
    clients: set[int] = set()
    outcomes: list[Outcome] = []
    for number, group in enumerate(_groups(job, secure, asked)):
        like = next((sent[client].update for client in group if client in sent), None)
        if like is None:
            continue
        encoding = secure.encoding(len(group))
        session = Session(
            run=run,
            round=asked[0].version,
            attempt=attempt * secure.settings.groups + number,
            model=model,
            clients=group,
            silent={client: silent[client] for client in group if client in silent},
            length=length(like),
            encoding=encoding,
            vector=partial(_vector, sent, largest, encoding, job.seed, attempt),
        )
        outcome = secure.scheme.play(session, stage_for(len(group), session.length))
        outcomes.append(outcome)
        if outcome.total_L is not None:
            found = from_sum(outcome.total_L, len(outcome.survivors), like, largest, encoding)
            if found is not None:
                sums.append(found)
                clients.update(outcome.survivors)
    return _told(job, sums, clients, outcomes, len(asked))


def _vector(
    sent: Mapping[int, Sent], largest: Largest, encoding: Encoding, seed: int, attempt: int, client: int
) -> np.ndarray:
    update, report = sent[client]
    rounding = rounding_of(seed, attempt, client)
    return to_integers(update, report.num_samples, report.loss, largest, encoding, rounding)


def _groups(job: Job, secure: Secure, asked: Sequence[Task]) -> list[tuple[int, ...]]:
    """The cohort, split at random into groups that differ by one client at most."""
    clients = sorted(task.client for task in asked)
    num = secure.settings.groups
    if num == 1:
        return [tuple(clients)]
    mixed = generator(job.seed, "secagg groups", asked[0].attempt).permutation(clients).tolist()
    return [tuple(sorted(mixed[place::num])) for place in range(num)]


def _told(job: Job, sums: list[Sum], clients: set[int], outcomes: list[Outcome], num_asked: int) -> Added:
    samples = sum(each.samples for each in sums)
    bytes_up = sum(outcome.bytes_up for outcome in outcomes)
    vectors_up = sum(each.total_L.nbytes * len(each.survivors) for each in outcomes if each.total_L is not None)
    enough = len(sums) >= max(1, job.aggregator.min_updates)
    row = {
        "asked": num_asked,
        "lost": num_asked - len(clients),
        "cut": sum(each.cut * each.num_clients for each in sums) / max(1, len(clients)),
        "keys_up": bytes_up - vectors_up,
    }
    failures = [outcome.why for outcome in outcomes if outcome.why]
    return Added(
        rows=stack([each.update for each in sums]) if enough else None,
        clients=frozenset(clients),
        samples=samples,
        loss=sum(each.loss * each.samples for each in sums) / max(1.0, samples),
        bytes_up=bytes_up,
        upload=bytes_up // num_asked,
        bytes_down=sum(outcome.bytes_down for outcome in outcomes),
        row=row | ({"failed_groups": len(failures)} if failures else {}),
    )
