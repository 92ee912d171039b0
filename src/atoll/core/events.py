"""Events: what happens in a run, as frozen records in one stream from every driver.

Progress bars, `metrics.jsonl`, `log.txt` and callbacks of users read this stream. Shapes: K classes, C clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LOG = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class SetupStep:
    """Something that takes long before the first round, such as compiling."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A run begins, or goes on after `version` rounds."""

    title: str
    version: int
    rounds: int
    """Number of rounds that the plan asks for."""
    setup_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TasksSent:
    """Clients are asked to work on a version."""

    version: int
    attempt: int
    clients: tuple[int, ...]
    """Empty where privacy hides who is asked."""


@dataclass(frozen=True, kw_only=True)
class ClientReported:
    """Clients of the present round have done their work."""

    num_done: int
    num_expected: int


@dataclass(frozen=True, kw_only=True)
class BudgetCharged:
    """An attempt of a private run was charged."""

    attempt: int
    epsilon: float
    """Spent by all attempts so far, at most."""
    delta: float


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A version was measured."""

    version: int
    metrics: Mapping[str, Mapping[str, float | None]]
    """As in a metrics row: `test`, `models_test`, `clients_test`, `shared_test`."""
    charts: Mapping[str, Any] = field(default_factory=dict)
    """What the report draws, by metric: `confusion` holds the matrix of a classifier."""
    clients: tuple[int, ...] = ()
    """The clients of `scores_C2`."""
    scores_C2: np.ndarray | None = None
    """Main figure and loss of each of these clients on its own samples."""
    main: str = "accuracy"
    """The name of the main figure."""


@dataclass(frozen=True, kw_only=True)
class NewClientsEvaluated:
    """Clients that took no part in training were measured, at the end of a run."""

    version: int
    figures: Mapping[int, Mapping[str, float]]
    """Steps of adaptation -> `mean`, `worst_decile` and others of their main figures, and their mean `loss`."""
    main: str
    """The name of the main figure."""


@dataclass(frozen=True, kw_only=True)
class RoundCommitted:
    """A version counts."""

    row: dict[str, Any]
    """Its line of `metrics.jsonl`."""
    again: bool = False
    """Whether this round was told before, and its row only says more now."""


@dataclass(frozen=True, kw_only=True)
class AttemptAbandoned:
    """Nothing was made of an attempt."""

    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """A run is over, or was interrupted."""

    reason: str
    version: int


Event = (
    SetupStep
    | RunStarted
    | TasksSent
    | ClientReported
    | BudgetCharged
    | Evaluated
    | NewClientsEvaluated
    | RoundCommitted
    | AttemptAbandoned
    | RunEnded
)
Reader = Callable[[Event], object]


def unread(event: Event) -> None:
    """Read nothing."""


def publish(readers: Sequence[Reader]) -> Reader:
    """Return a reader that hands each event to all of these, in order.

    One that raises is warned about, once, and not asked again: looking on must not end a run.
    """
    broken: set[int] = set()

    def read(event: Event) -> None:
        for number, reader in enumerate(readers):
            if number in broken:
                continue
            try:
                reader(event)
            except Exception as error:
                broken.add(number)
                _LOG.warning(
                    "%s raised %s: %s at %s; the run goes on without it",
                    getattr(reader, "__qualname__", type(reader).__name__),
                    type(error).__name__,
                    error,
                    type(event).__name__,
                )

    return read
