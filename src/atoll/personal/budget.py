"""Local work of a plan's clients, known before a run: who is asked when, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from atoll.core.coordinator import (
    Arrived,
    Begin,
    Commit,
    Committed,
    Coordinator,
    CoordinatorState,
    Event,
    Finish,
    Phase,
)
from atoll.core.messages import Task
from atoll.core.problem import Loss
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.trainer import Trainer

Rounds = Sequence[tuple[Task, ...]]
"""The tasks of each round."""


class Load(NamedTuple):
    """One task."""

    round: int
    """The number of its round, from 0."""
    client: int
    steps: int
    samples: int
    """Samples that are trained on, every pass counted."""


class Step(NamedTuple):
    """What one local step computes, and what a client sends and keeps after it."""

    gradients: int
    """Backward passes through the model."""
    travels: int
    """Values of an update, before codecs."""
    kept: int
    """Values that a client remembers for its next task."""


def cohorts(coordinator: Coordinator) -> Rounds:
    """Return the tasks of every round, if every client that is asked answers at once."""
    state, event, rounds = CoordinatorState(), Begin(), list[tuple[Task, ...]]()
    goal, overlaps = coordinator.policy.goal(coordinator.num_clients), coordinator.policy.overlaps_rounds
    following: Event | None = event
    while following is not None:
        state, commands = coordinator.step(state, following)
        waiting = tuple(state.in_flight.values())
        following = Arrived(waiting[: goal - len(state.arrived)] if overlaps else waiting)
        if state.phase is Phase.READY:
            following = Begin()
        for command in commands:
            if isinstance(command, Commit):
                rounds.append(command.tasks)
                following = Committed(len(command.tasks))
            elif isinstance(command, Finish):
                following = None
    return rounds


def loads_of(job: Job, rounds: Rounds) -> list[Load]:
    """Return what every task of these rounds is; work that is not the local loop counts its batches as steps."""
    loads, seen = list[Load](), set[int]()
    for number, task in ((number, task) for number, tasks in enumerate(rounds) for task in tasks):
        samples = job.num_passes(task, first=task.client not in seen)
        steps = job.num_steps(task.client, task.work)
        if job.work.num_passes is not None:
            steps = -(-samples // min(job.batch_size, job.federation.num_samples(task.client)))
        loads.append(Load(number, task.client, steps, samples))
        seen.add(task.client)
    return loads


def rounds_within(loads: Sequence[Load], adaptation: int, clients: Collection[int], budget: int) -> int:
    """Return in how many rounds these clients take no more than `budget` steps in all, with those of adaptation."""
    total, last = adaptation * len(clients), -1
    for load in loads:
        total += load.steps if load.client in clients else 0
        if total > budget:
            return load.round
        last = load.round
    return last + 1


def rehearse_step(job: Job) -> Step:
    """Let a client take one step, and count what the local loop does for it."""
    num_gradients = 0

    def count(grad: Tensor) -> None:
        nonlocal num_gradients
        num_gradients += 1

    def counting(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
        def counted(outputs: Tensor, targets: Tensor) -> Tensor:
            values = loss(outputs, targets)
            if values.requires_grad:
                values.register_hook(count)  # type: ignore[no-untyped-call]
            return values

        return counted

    def rehearsed(each: Job) -> Job:
        local = replace(each.local, epochs=None, steps=1)
        return replace(each, local=local, loss=counting(each.loss), mechanism=None, attack=None)

    copied = replace(rehearsed(job), architectures=tuple(map(rehearsed, job.architectures)))
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    done = Trainer(copied).train_one(Task(0, 0, 0), sent, {})
    travels = done.update.delta_D.numel() + sum(extra.numel() for extra in done.update.aux.values())
    return Step(num_gradients, travels, sum(value.numel() for value in done.state.values()))
