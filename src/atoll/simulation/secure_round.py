"""Secure aggregation in a simulation: who is lost when, and the sessions of all groups in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.commit.secure_sum import Added, groups_of, largest_of, session_of, told, vector_of
from atoll.core.messages import Task, Update
from atoll.core.params import params_hash
from atoll.core.seeds import generator
from atoll.secagg.encoding import Encoding
from atoll.secagg.scheme import Outcome, Session
from atoll.simulation.client_hosts import host_for
from atoll.train.exchange import Report
from atoll.train.job import Job
from atoll.train.secure import Largest


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
    largest = largest_of(job, asked)
    before = secure.scheme.steps[secure.scheme.counts_from]
    silent = {client: before for client in (task.client for task in asked) if client not in sent} | dict(lost)
    rounds: list[tuple[Session, Outcome, Update]] = []
    for number, group in enumerate(groups_of(job, asked)):
        like = next((sent[client].update for client in group if client in sent), None)
        if like is None:
            continue
        session = session_of(job, run, params_hash(params_D), asked[0], number, group, like, largest)
        session = session._replace(
            silent={client: silent[client] for client in group if client in silent},
            vector=partial(_vector, job, sent, largest, session.encoding, asked[0].attempt),
        )
        rounds.append((session, secure.scheme.simulate(session, host_for(len(group), session.length)), like))
    return told(job, rounds, largest, len(asked))


def _vector(
    job: Job, sent: Mapping[int, Sent], largest: Largest, encoding: Encoding, attempt: int, client: int
) -> np.ndarray:
    update, report = sent[client]
    return vector_of(job, update, report.num_samples, report.loss, largest, encoding, attempt, client)
