"""The round state machine: `step(state, event) -> (state, commands)`, without I/O, clock or hidden randomness.

It decides which clients get tasks, which updates count and when a commit is due; vectors never pass through it. A
simulation, which knows in advance which updates will arrive, trains only those that count; a network server folds the
updates that have arrived. Both drive this machine. A policy (synchronous, buffered, ...) and a sampler parametrise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from atoll.core.errors import AtollError
from atoll.core.messages import Task
from atoll.core.sampler import Pick, Population, Sampler
from atoll.core.seeds import generator


class Phase(StrEnum):
    """States of the machine."""

    READY = "ready"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    FINISHED = "finished"


class Reason(StrEnum):
    """Reasons for which an update is rejected, an attempt abandoned or a run ended."""

    UNKNOWN_TASK = "unknown task"
    LATE = "late"
    TOO_FEW = "too few updates"
    ALL_ROUNDS = "all rounds done"
    TARGET = "target reached"
    BYTES = "byte budget spent"
    SECONDS = "time is up"
    SIMULATED_SECONDS = "simulated time is up"
    SAMPLES = "compute budget spent"
    PRIVACY = "privacy budget spent"
    INTERRUPTED = "interrupted"
    GAVE_UP = "gave up: too many rounds in a row were abandoned"
    ALL_LOST = "gave up: too many tasks in a row were lost"
    DIVERGED = "diverged: the model or its metrics are not finite"


FAILURES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.GAVE_UP: "lower policy.min_reports, raise policy.deadline, or set eligibility so that more devices "
        "meet it",
        Reason.ALL_LOST: "let the devices lose fewer tasks (devices.dropout, devices.fraction)",
        Reason.DIVERGED: "lower local.lr or server.lr, take fewer local steps, or check the data; under attack, use "
        "another aggregator",
    }
)
"""Reasons for which a run ends without having done what the plan asks for, each with a remedy."""

NOTHING: Mapping[int, Any] = MappingProxyType({})


class CoordinatorState(NamedTuple):
    """The whole memory of the machine; small plain data, which is saved at every commit."""

    phase: Phase = Phase.READY
    version: int = 0
    attempt: int = 0
    in_flight: Mapping[int, Task] = NOTHING
    """Tasks sent and still expected, by client: a client has at most one."""
    arrived: tuple[Task, ...] = ()
    """Tasks done, waiting for a commit."""
    committing: tuple[Task, ...] = ()
    """Tasks that are being aggregated into the next version."""
    abandoned: int = 0
    abandoned_in_a_row: int = 0
    failed: int = 0
    lost_in_a_row: int = 0
    """Tasks that failed since the last one arrived; counted only if the policy overlaps rounds."""
    rejected: int = 0
    scores: Mapping[int, float] = NOTHING
    """Last score of each client that took part, for the sampler."""

    def to_plain(self) -> dict[str, Any]:
        """Return the state as data for JSON."""
        return {**self._asdict(), "in_flight": list(self.in_flight.values()), "scores": dict(self.scores)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CoordinatorState:
        """Return the state that `to_plain` wrote, also after JSON turned keys into text and tuples into lists."""
        fields = dict(plain)
        for name in ("in_flight", "arrived", "committing"):
            fields[name] = tuple(Task(*task) for task in fields[name])
        fields["in_flight"] = {task.client: task for task in fields["in_flight"]}
        fields["phase"] = Phase(fields["phase"])
        fields["scores"] = {int(client): score for client, score in fields["scores"].items()}
        return cls(**fields)


def any_client(client: int) -> bool:
    """Return True: every client can be reached."""
    return True


class Begin(NamedTuple):
    """Event: the driver is ready for the next attempt."""

    reachable: Callable[[int], bool] = any_client
    """(client) -> whether it can be reached now and is eligible."""


class Arrived(NamedTuple):
    """Event: clients have done their tasks, in this order."""

    tasks: tuple[Task, ...]


class Failed(NamedTuple):
    """Event: clients will not do their tasks."""

    tasks: tuple[Task, ...]


class Deadline(NamedTuple):
    """Event: the time of an attempt is over."""

    attempt: int


class Committed(NamedTuple):
    """Event: the driver made a new version of `num_valid` updates; `num_invalid` were not finite or of wrong shape."""

    num_valid: int
    num_invalid: int = 0
    scores: Mapping[int, float] = NOTHING
    """New score of each client that took part, for the sampler."""


class Halt(NamedTuple):
    """Event: the run shall end now."""

    reason: Reason


class Send(NamedTuple):
    """Command: send these tasks to their clients."""

    tasks: tuple[Task, ...]


class Commit(NamedTuple):
    """Command: aggregate these tasks into the next version, then report Committed."""

    tasks: tuple[Task, ...]


class Reject(NamedTuple):
    """Command: drop the update of this task."""

    task: Task
    reason: Reason


class Abandon(NamedTuple):
    """Command: end this attempt without a commit."""

    attempt: int
    reason: Reason


class Finish(NamedTuple):
    """Command: end the run."""

    reason: Reason


Event = Begin | Arrived | Failed | Deadline | Committed | Halt
Command = Send | Commit | Reject | Abandon | Finish
Step = tuple[CoordinatorState, list[Command]]

EXPECTED: dict[Phase, tuple[type, ...]] = {
    Phase.READY: (Begin, Arrived, Failed, Deadline, Halt),
    Phase.COLLECTING: (Arrived, Failed, Deadline, Halt),
    Phase.COMMITTING: (Committed, Arrived, Failed, Deadline, Halt),
    Phase.FINISHED: (Arrived, Failed, Deadline, Halt),
}
"""The events allowed in each phase; any other is an error and changes nothing."""


def full_weight(late: int) -> float:
    """Return 1: late updates are not weighed down."""
    return 1.0


class Policy(NamedTuple):
    """When tasks are sent and when a commit is due."""

    num_wanted: Callable[[CoordinatorState, int], int]
    """(state, number of registered clients) -> number of tasks to send now."""
    goal: Callable[[int], int]
    """(number of registered clients) -> number of updates in a commit."""
    min_reports: int = 1
    """Minimum number of valid updates; with fewer, the attempt is abandoned."""
    overlaps_rounds: bool = False
    """Whether tasks in flight still count after a commit, as in asynchronous rounds."""
    max_abandoned: int = 100
    """Number of abandoned attempts in a row that ends the run."""
    max_lost: int = 1000
    """Number of lost tasks in a row that ends the run, for policies that overlap rounds."""
    deadline: float | None = None
    """Seconds after which an attempt is closed with the updates that have arrived."""
    staleness: Callable[[int], float] = full_weight
    """(versions late) -> factor on the weight of an update, in [0, 1]."""
    interpolates: bool = False
    """Whether the new model is (1 - m) w + m w_k, instead of w moved by the client's update."""
    min_clients: int = 1
    """Minimum number of registered clients."""


def no_sizes() -> np.ndarray:
    """Raise: the coordinator was built without the clients' sizes."""
    raise AtollError("coordinator: the sampler needs the clients' sizes, but none were given; this is a bug, report it")


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """The fixed part of the machine: policy, sampler, number of clients, number of rounds, seed."""

    policy: Policy
    sampler: Sampler
    num_clients: int
    rounds: int
    seed: int
    sizes: Callable[[], np.ndarray] = no_sizes
    secret_rng: Callable[[int], np.random.Generator] | None = None
    """(attempt) -> generator of its cohort, for secret cohorts; None: it derives from the seed."""

    def step(self, state: CoordinatorState, event: Event) -> Step:
        """Process one event; an event that the phase does not allow raises and leaves the state unchanged."""
        if not isinstance(event, EXPECTED[state.phase]):
            raise AtollError(
                f"coordinator: {type(event).__name__} is not allowed while {state.phase}; this is a bug, report it"
            )
        match event:
            case Begin(reachable):
                return self._next_attempt(state, reachable)
            case Arrived(tasks):
                return self._arrived(state, tasks)
            case Failed(tasks):
                lost = _expected(tasks, state.in_flight)
                state = state._replace(in_flight=_without(state.in_flight, lost), failed=state.failed + len(lost))
                if self.policy.overlaps_rounds:
                    state = state._replace(lost_in_a_row=state.lost_in_a_row + len(lost))
                    if state.phase is Phase.COLLECTING:
                        return self._ready(state), []  # the next attempt replaces the lost tasks at once
                return self._close_if_due(state)
            case Deadline(attempt):
                is_due = state.phase is Phase.COLLECTING and attempt == state.attempt
                return self._close(state) if is_due else (state, [])
            case Committed():
                return self._committed(state, event)
            case Halt(reason):
                return state._replace(phase=Phase.FINISHED), [Finish(reason)]

    @property
    def _goal(self) -> float:
        """Number of updates in a commit; infinite if all clients of a random cohort count."""
        waits_for_all = self.sampler.draws_size and not self.policy.overlaps_rounds
        return math.inf if waits_for_all else self.policy.goal(self.num_clients)

    def _next_attempt(self, state: CoordinatorState, reachable: Callable[[int], bool]) -> Step:
        if state.version >= self.rounds:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.ALL_ROUNDS)]
        if state.abandoned_in_a_row >= self.policy.max_abandoned:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.GAVE_UP)]
        if state.lost_in_a_row >= self.policy.max_lost:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.ALL_LOST)]
        picks = self._picks(state, reachable)
        version, attempt = state.version, state.attempt
        tasks = tuple(Task(client=pick.client, version=version, attempt=attempt, share=pick.share) for pick in picks)
        in_flight = {**state.in_flight, **{task.client: task for task in tasks}}
        state = state._replace(phase=Phase.COLLECTING, in_flight=in_flight)
        sent: list[Command] = [Send(tasks)] if tasks else []
        state, more = self._close_if_due(state)  # the sampler may pick no client, or enough may have arrived before
        return state, sent + more

    def _picks(self, state: CoordinatorState, reachable: Callable[[int], bool]) -> list[Pick]:
        """Choose the clients of the next attempt."""
        num = self.policy.num_wanted(state, self.num_clients)
        if num <= 0:
            return []
        busy = {*state.in_flight, *(task.client for task in state.arrived)}
        population = Population(
            num_clients=self.num_clients,
            free=lambda client: client not in busy and reachable(client),
            sizes=self.sizes,
            scores=state.scores,
            attempt=state.attempt,
        )
        secret = self.secret_rng
        rng = generator(self.seed, "cohort", state.attempt) if secret is None else secret(state.attempt)
        return self.sampler.sample(rng, num, population)

    def _arrived(self, state: CoordinatorState, tasks: tuple[Task, ...]) -> Step:
        num_open = math.inf if self.policy.overlaps_rounds else self._goal - len(state.arrived)
        expected = _expected(tasks, state.in_flight)
        counted = expected if len(expected) <= num_open else expected[: int(num_open)]
        refused = set(tasks).difference(counted) if len(counted) < len(tasks) else ()
        commands = [
            Reject(task, Reason.LATE if task.attempt <= state.attempt else Reason.UNKNOWN_TASK)
            for task in tasks
            if task in refused
        ]
        state = state._replace(
            in_flight=_without(state.in_flight, counted),
            arrived=state.arrived + counted,
            lost_in_a_row=0 if counted else state.lost_in_a_row,
            rejected=state.rejected + len(commands),
        )
        state, more = self._close_if_due(state)
        return state, [*commands, *more]

    def _close_if_due(self, state: CoordinatorState) -> Step:
        """Close the attempt if enough tasks have arrived or none is in flight."""
        full = len(state.arrived) >= self._goal
        if state.phase is not Phase.COLLECTING or not (full or not state.in_flight):
            return state, []
        return self._close(state) if full or not self.policy.overlaps_rounds else self._abandon(state)

    def _close(self, state: CoordinatorState) -> Step:
        """End the attempt: commit the tasks that arrived, or abandon it."""
        if len(state.arrived) < self.policy.min_reports:
            return self._abandon(state)
        overlaps = self.policy.overlaps_rounds
        goal = self.policy.goal(self.num_clients) if overlaps else len(state.arrived)
        state = state._replace(
            phase=Phase.COMMITTING,
            in_flight=state.in_flight if overlaps else {},
            arrived=state.arrived[goal:],
            committing=state.arrived[:goal],
        )
        return state, [Commit(state.committing)]

    def _abandon(self, state: CoordinatorState) -> Step:
        command = Abandon(state.attempt, Reason.TOO_FEW)
        counted = state._replace(abandoned=state.abandoned + 1, abandoned_in_a_row=state.abandoned_in_a_row + 1)
        return self._ready(counted), [command]

    def _committed(self, state: CoordinatorState, event: Committed) -> Step:
        scores = {**state.scores, **event.scores} if event.scores else state.scores
        state = state._replace(rejected=state.rejected + event.num_invalid, scores=scores)
        if event.num_valid < self.policy.min_reports:
            return self._abandon(state)
        return self._ready(state._replace(version=state.version + 1, abandoned_in_a_row=0)), []

    def _ready(self, state: CoordinatorState) -> CoordinatorState:
        """Return the state before the next attempt; the driver saves it, then sends Begin."""
        overlaps = self.policy.overlaps_rounds
        return state._replace(
            phase=Phase.READY,
            attempt=state.attempt + 1,
            in_flight=state.in_flight if overlaps else {},
            arrived=state.arrived if overlaps else (),
            committing=(),
        )


def _expected(tasks: tuple[Task, ...], in_flight: Mapping[int, Task]) -> tuple[Task, ...]:
    """Return the distinct tasks that are in flight."""
    return tuple(task for task in dict.fromkeys(tasks) if in_flight.get(task.client) == task)


def _without(in_flight: Mapping[int, Task], removed: tuple[Task, ...]) -> dict[int, Task]:
    """Return the tasks in flight without the removed ones."""
    remaining = dict(in_flight)
    for task in removed:
        del remaining[task.client]
    return remaining
