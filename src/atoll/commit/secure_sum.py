"""One round's sums under secure aggregation: who is lost when, in which groups, and what the sums say."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from atoll.core.aggregator import as_rows
from atoll.core.messages import State, Task, Update, stack
from atoll.core.seeds import generator
from atoll.secagg.encoding import Encoding
from atoll.secagg.scheme import Outcome, Session
from atoll.train.job import Job
from atoll.train.secure import (
    Largest,
    Sum,
    from_grid_sum,
    from_sum,
    grid_integers,
    length,
    rounding_of,
    to_integers,
)


class Added(NamedTuple):
    """What the server knows of a round."""

    folded: State | None
    """The mean of each group as a row, or the sum of whole numbers; None if there are too few."""
    clients: frozenset[int]
    """Whose updates are in them."""
    samples: float
    loss: float
    """Mean training loss by samples; NaN if no client has one. Clients without one count as 0 beside others."""
    bytes_up: int
    bytes_down: int
    upload: int
    """What one client sent, on average."""
    row: dict[str, Any]
    """What the metrics say of it."""


def session_of(
    job: Job,
    run: str,
    params: bytes,
    first: Task,
    number: int,
    group: tuple[int, ...],
    like: Update,
    largest: Largest,
) -> Session:
    """One group's session, for updates of this layout; nobody is lost yet, and vectors are elsewhere.

    All who take part must agree on the model, and on what their weights are shares of: who could tell each another
    largest weight could let one of them outweigh all others, and see its update in the sum.
    """
    secure = job.secure
    assert secure is not None
    encoding = secure.encoding(len(group))
    return Session(
        run=run,
        round=first.version,
        attempt=first.attempt * secure.settings.groups + number,
        model=hashlib.sha256(struct.pack("<dQ", *largest) + params).digest(),
        clients=group,
        silent={},
        length=like.vector().numel() + 1 if _on_grid(job) else length(like, encoding),
        encoding=encoding,
        min_survivors=least_of(job, len(group)),
    )


def largest_of(job: Job, asked: Sequence[Task]) -> Largest:
    """What weights and sizes are shares of."""
    share = max(task.share for task in asked)
    heaviest = 1 if job.mechanism is not None and job.mechanism.at_client is not None else job.federation.max_samples
    return Largest(share * heaviest, job.federation.max_samples)


def _on_grid(job: Job) -> bool:
    """Whether updates are whole numbers already, with noise in them."""
    return job.mechanism is not None and job.mechanism.on_grid is not None


def least_of(job: Job, num_clients: int) -> int:
    """Return the minimum survivors of a sum: what the plan says, and all whose noise it needs."""
    assert job.secure is not None
    least = job.secure.settings.required_survivors
    if job.mechanism is None or job.mechanism.min_reports is None:
        return least
    return max(least, job.mechanism.min_reports(num_clients))


def vector_of(
    job: Job, update: Update, samples: int, loss: float, largest: Largest, encoding: Encoding, attempt: int, client: int
) -> np.ndarray:
    """What a client adds to the sum."""
    if _on_grid(job):
        return grid_integers(update, encoding)
    if job.mechanism is not None:  # nothing but the update is protected
        samples, loss = largest.samples, 0.0
    if math.isnan(loss) and not job.work.always_has_loss:
        loss = 0.0
    return to_integers(update, samples, loss, largest, encoding, rounding_of(job.seed, attempt, client))


def groups_of(job: Job, asked: Sequence[Task]) -> list[tuple[int, ...]]:
    """The cohort, split at random into groups that differ by one client at most."""
    assert job.secure is not None
    clients, num = sorted(task.client for task in asked), job.secure.settings.groups
    if num == 1:
        return [tuple(clients)]
    mixed = generator(job.seed, "secagg groups", asked[0].attempt).permutation(clients).tolist()
    return [tuple(sorted(mixed[place::num])) for place in range(num)]


def told(job: Job, rounds: list[tuple[Session, Outcome, Update]], largest: Largest, num_asked: int) -> Added:
    """What the sums of all groups say together."""
    clients: set[int] = set()
    sums: list[Sum] = []
    folded: State | None = None
    bytes_up = vectors_up = 0
    for session, outcome, like in rounds:
        bytes_up += outcome.bytes_up
        if outcome.total_L is None:
            continue
        vectors_up += outcome.total_L.nbytes * len(outcome.survivors)
        found: Sum | State | None
        if _on_grid(job):
            found = folded = from_grid_sum(outcome.total_L, len(outcome.survivors), like, session.encoding)
        else:
            found = from_sum(outcome.total_L, len(outcome.survivors), like, largest, session.encoding)
            sums += [found] if found is not None else []
        clients.update(outcome.survivors if found is not None else ())
    if sums and len(sums) >= job.aggregator.min_updates:
        folded = as_rows(stack([each.update for each in sums]))
    samples = sum(each.samples for each in sums)
    loss = sum(each.loss * each.samples for each in sums) / max(1.0, samples)
    if loss == 0 and not job.work.always_has_loss:  # zeros are added exactly: nobody had a loss
        loss = math.nan
    failures = sum(1 for _, outcome, _ in rounds if outcome.why)
    row = {
        "asked": num_asked,
        "lost": num_asked - len(clients),
        "cut": sum(each.cut * each.num_clients for each in sums) / max(1, len(clients)),
        "keys_up": bytes_up - vectors_up,
    }
    return Added(
        folded=folded,
        clients=frozenset(clients),
        samples=samples,
        loss=loss,
        bytes_up=bytes_up,
        bytes_down=sum(outcome.bytes_down for _, outcome, _ in rounds),
        upload=bytes_up // num_asked,
        row=row | ({"failed_groups": failures} if failures else {}),
    )
