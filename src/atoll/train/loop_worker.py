"""What works have in common whose clients run the local loop, one by one or stacked. Shapes: C clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from atoll.core.client_work import Worker
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.train.job import Job
from atoll.train.loop import Workspace


class Started(NamedTuple):
    """What the local loop of several clients begins with."""

    sent: list[Broadcast]
    memories: list[State]
    first_losses: list[float]
    """The loss of the model that each client got, on its training samples; NaN if nobody needs it."""
    notes: State
    """What the worker must know of them at the end, (C, ...) each."""


class LoopWorker(Worker):
    """Trains clients by the loop of an inner job, which engines may stack."""

    job: Job
    inner: Job
    """The job of the model that is trained."""

    @property
    @abstractmethod
    def space(self) -> Workspace:
        """The working model of the inner job."""

    @abstractmethod
    def arrived(self, sent: Broadcast, client: int, steps: int) -> tuple[Tensor, State]:
        """Return the model of a new client as `own` does: from what it is sent, after steps on its training samples."""

    @abstractmethod
    def begin(self, tasks: Sequence[Task], sent: Sequence[Broadcast], memories: Sequence[State]) -> Started:
        """Return what the loop of the inner job gets for these tasks."""

    @abstractmethod
    def end(self, update: Update, states: State, started: Started) -> tuple[Update, State]:
        """Return what clients send and remember, of the stacked updates and memories that the inner loop gave."""
