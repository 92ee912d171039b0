"""The way up: what a client sends, and what the server makes of it. Shapes: C clients, D parameters, V packed values.

A simulation does both sides here, one after the other; over a network each side does its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Expected
from atoll.core.messages import Payload, State, Task, Update
from atoll.core.privacy import SendContext
from atoll.core.seeds import generator
from atoll.core.transform import Encoding
from atoll.privacy.noise import derived
from atoll.train.job import Job

UPLINK = "uplink."
"""What the names of the uplink's memory begin with among what a client remembers."""


class Report(NamedTuple):
    """What is known of one client's task, beside its vectors."""

    client: int
    num_samples: int
    num_steps: int
    loss: float
    norm: float
    """The length of its update."""
    bytes_up: int
    valid: bool
    """Whether the update was `acceptable`; others are left out."""


def in_a_sum(client: int) -> Report:
    """Return the report of a client of which only the sum of several is known."""
    return Report(client=client, num_samples=0, num_steps=0, loss=0.0, norm=0.0, bytes_up=0, valid=True)


class Traffic(NamedTuple):
    """What was sent for some tasks, where clients and server exchange more than a broadcast and an update each."""

    bytes_down: int
    seconds: float | None
    """Simulated seconds that it took; None if it takes none."""
    counts: Mapping[str, int]
    """Further counts for the metrics row, which add up over rounds."""


class Work(NamedTuple):
    """What came of some tasks: their updates folded, a report each, and what clients remember."""

    folded: State
    reports: list[Report]
    states: dict[int, State]
    traffic: Traffic | None = None
    """What was sent, where an engine counts it."""


class Told(NamedTuple):
    """What a client tells of its update."""

    num_samples: int
    loss: float
    """Mean training loss over the steps; NaN if the work has none."""
    bytes_up: int


def protected(job: Job, tasks: list[Task], updates: Update) -> Update:
    """Stacked updates with the noise that clients add themselves, where they trust nobody."""
    if job.mechanism is None or job.mechanism.at_client is None:
        return updates
    return job.mechanism.at_client(updates, sent_by(job, tasks))


def encoded(job: Job, task: Task, update: Update, before: State) -> tuple[Payload, State]:
    """One client's update as it travels, and what its uplink remembers; `before` is all that the client remembers."""
    memory = {name.removeprefix(UPLINK): value for name, value in before.items() if name.startswith(UPLINK)}
    rng = generator(job.seed, "uplink", task.attempt, task.client)
    encoding = Encoding(job.spec.without_buffers, task.attempt, rng)
    payload, memory = job.uplink.encode(update.vector(), memory, encoding)
    return payload.beside(update.exact()), {f"{UPLINK}{name}": value for name, value in memory.items()}


def decoded(job: Job, layout: Update, payload: Payload) -> Update:
    """Undo `encoded`; `layout` gives the weight, and names and shapes of what must come out."""
    payload, exact = payload.split(layout.exact())
    return layout.rebuilt(job.uplink.decode(payload), exact)


def received(job: Job, fold: Aggregator, tasks: list[Task], updates: Update, told: Sequence[Told]) -> Work:
    """Fold stacked updates as the uplink's other end gives them, without those that are not `acceptable`."""
    if any(task.share != 1 for task in tasks):
        shares_C = torch.tensor([task.share for task in tasks], dtype=updates.weight.dtype)
        updates = updates._replace(weight=updates.weight * shares_C)
    valid_C = acceptable(job, tasks, updates)
    mechanism = job.mechanism
    summed = mechanism is not None and mechanism.on_grid is not None  # what is not finite counts there as nothing
    norms = updates.delta_D.norm(dim=1).tolist()
    reports = [
        Report(
            client=task.client,
            num_samples=each.num_samples,
            num_steps=job.num_steps(task.client, task.work),
            loss=each.loss,
            norm=norms[i],
            bytes_up=each.bytes_up,
            valid=bool(valid_C[i]) or summed,
        )
        for i, (task, each) in enumerate(zip(tasks, told, strict=True))
    ]
    if mechanism is not None and mechanism.on_grid is not None:
        return Work(fold.add(fold.zero(), mechanism.on_grid(updates, sent_by(job, tasks))), reports, {})
    usable = updates if bool(valid_C.all()) else updates.rows(valid_C)
    return Work(fold.add(fold.zero(), usable) if bool(valid_C.any()) else fold.zero(), reports, {})


def sent_by(job: Job, tasks: list[Task]) -> SendContext:
    """What a mechanism may know of the updates of some tasks of one attempt."""
    assert job.mechanism is not None
    clip = job.mechanism.clip if tasks[0].clip is None else tasks[0].clip
    cohort = len(tasks) if job.exposure is None else job.exposure.cohort

    def key(row: int) -> bytes:
        return derived(job.secret, "client", tasks[row].attempt, tasks[row].client)

    return SendContext(job.spec, clip, cohort, key)


def acceptable(job: Job, tasks: Sequence[Task], updates: Update) -> Tensor:
    """Which clients of a stacked update sent what the server can count.

    That is finite, no longer than the plan's `server.max_norm`, with extra vectors no longer than its square (some are
    squared norms) that the algorithm finds plausible. Where updates go onto a grid or are added in secret, each value
    is clipped there instead.
    """
    good_C = finite(updates)
    clipped = job.secure is not None or (job.mechanism is not None and job.mechanism.on_grid is not None)
    if clipped or not bool(good_C.any()):
        return good_C
    good_C &= _norms(updates.delta_D) <= job.max_norm
    for rows in updates.aux.values():
        good_C &= _norms(rows) <= job.max_norm * job.max_norm  # inf, where ** would raise
    noisy = job.mechanism is not None and job.mechanism.at_client is not None
    if job.algorithm.plausible is not None and not noisy:
        steps_C = [float(job.num_steps(task.client, task.work)) for task in tasks]
        lr_C = [job.lr_of(task.version) for task in tasks]
        known = Expected(*(updates.weight.new_tensor(each) for each in (steps_C, lr_C)))
        good_C &= job.algorithm.plausible(updates, known)
    return good_C


def _norms(rows: Tensor) -> Tensor:
    """The L2 norm of each row, also where its square overflows."""
    flat_CD = rows.flatten(1)
    norm_C: Tensor = flat_CD.norm(dim=1)
    return norm_C if bool(norm_C.isfinite().all()) else flat_CD.double().norm(dim=1)


def finite(updates: Update) -> Tensor:
    """Which clients of a stacked update sent finite numbers only, and a weight that is not negative."""
    good_C = updates.weight.isfinite() & (updates.weight >= 0)
    for rows in (updates.delta_D, *updates.aux.values()):
        flat_C = rows.flatten(1)
        if not bool(flat_C.sum(1).isfinite().all()):  # a finite sum needs no closer look
            good_C &= flat_C.isfinite().all(1)
    return good_C
