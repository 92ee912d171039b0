"""What a simulated run is made of between two rounds, what is known of a round, and which limit a round has reached.

Shapes: C clients, D parameters, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from atoll.core.coordinator import NOTHING, CoordinatorState, Reason
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.plan import Stop
from atoll.train.exchange import Report


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
    bytes_down: int = 0
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


@dataclass(frozen=True, kw_only=True)
class Round:
    """What is known of one commit."""

    row: dict[str, Any]
    """Plain numbers, one line of the metrics file."""
    confusion_KK: np.ndarray | None = None
    clients: list[int] | None = None
    scores_C2: np.ndarray | None = None


def why_stop(stop: Stop, row: Mapping[str, Any]) -> Reason | None:
    """Which of a plan's limits a round has reached, if any."""
    spent: dict[Reason, tuple[float | None, float]] = {
        Reason.TARGET: (stop.accuracy, row.get("test", {}).get("accuracy") or 0.0),
        Reason.BYTES: (stop.bytes, row.get("bytes_up", 0) + row.get("bytes_down", 0)),
        Reason.SAMPLES: (stop.samples, row.get("samples_trained", 0)),
        Reason.SIMULATED_SECONDS: (stop.simulated_seconds, row.get("simulated_seconds", 0.0)),
        Reason.SECONDS: (stop.seconds, row["seconds"]),
    }
    return next((reason for reason, (most, now) in spent.items() if most is not None and now >= most), None)
