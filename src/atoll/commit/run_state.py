"""The state of a run between two rounds. Shapes: D parameters, M values of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from atoll.commit.guard import Guard
from atoll.core.coordinator import NOTHING, CoordinatorState
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.train.exchange import Report
from atoll.train.job import Job, first_server


class Journey(NamedTuple):
    """A task on its way, in simulated time."""

    task: Task
    ends: float
    fails: bool


class Ahead(NamedTuple):
    """A task that was trained before it arrived."""

    update: Update
    """Empty if it is not valid."""
    report: Report
    state: State


class RunState(NamedTuple):
    """All that a run is made of at a commit; writing it down and reading it back continues to the same bits."""

    params_D: Tensor
    server: State
    rule: State
    """What the aggregator remembers."""
    clients: Mapping[int, State] = NOTHING
    coordinator: CoordinatorState = CoordinatorState()
    bytes_up: int = 0
    """Bytes of updates, or of messages of secure aggregation, as they are packed: nothing of the transport counts."""
    bytes_down: int = 0
    """Bytes of broadcasts likewise, for each client that was asked, and of messages of secure aggregation."""
    samples: int = 0
    """Samples trained on, every pass counted."""
    seconds: float = 0.0
    clock: float = 0.0
    """Simulated seconds."""
    upload: int = 0
    """The largest payload so far, in bytes: what a client is expected to send."""
    journeys: tuple[Journey, ...] = ()
    """Tasks on their way, in the order of their ends."""
    works: Mapping[Task, float] = MappingProxyType({})
    """How much of its work each task has time for, where that is not all."""
    sent: Mapping[int, Broadcast] = NOTHING
    """What was sent of each version that somebody still works on."""
    ahead: Mapping[int, Ahead] = NOTHING
    """What clients will answer that have not arrived yet."""
    downlink: Mapping[str, Tensor] = MappingProxyType({})
    """What the downlink remembers: above all, what clients know."""
    news: int = 0
    """The bytes of all broadcasts so far, each counted once."""
    last_news: int = 0
    """The bytes of the newest."""
    heard: Mapping[int, int] = NOTHING
    """How many of those bytes each client has heard, where differences are sent."""
    trust: Mapping[int, float] = NOTHING
    """How far the server trusts each client that was looked at, where there is detection."""
    quarantined: tuple[int, ...] = ()
    """Clients that are not asked any more."""
    contribution: Mapping[int, float] = NOTHING
    """What each client has added to the model over the rounds, where that is computed."""


def first_state(job: Job, guard: Guard | None, first_M: Tensor | None = None) -> RunState:
    """Return the state that a run begins with; `first_M` is the first model, where the job has no memory for it."""
    model_M = job.first_D.clone() if first_M is None else first_M
    rule = job.aggregator.init() if guard is None else guard.init()
    return RunState(params_D=model_M, server=first_server(job, model_M), rule=rule, upload=model_M.nbytes)
