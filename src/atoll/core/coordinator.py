"""The round state machine: `step(state, event) -> (state, commands)`, without I/O, clock or hidden randomness.

It decides who is asked, whose work counts and when a commit is due; vectors never pass through it. A simulation, which
knows beforehand who will arrive, trains only the clients whose work counts; a network server folds what has arrived.
Both drive this machine. A policy (synchronous, buffered, ...) and a sampler say how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from atoll.core.errors import AtollError
from atoll.core.messages import Task
from atoll.core.seeds import generator


class Phase(StrEnum):
    """Where the machine stands."""

    READY = "ready"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    FINISHED = "finished"


class Reason(StrEnum):
    """Why an update was rejected, a round abandoned or a run ended."""

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
"""The reasons for which a run ends without having done what the plan asks for, and what to do about each."""

NOTHING: Mapping[int, Any] = MappingProxyType({})


class CoordinatorState(NamedTuple):
    """All that the machine remembers; small and plain, so that it can be written down at every commit."""

    phase: Phase = Phase.READY
    version: int = 0
    attempt: int = 0
    in_flight: Mapping[int, Task] = NOTHING
    """Asked, and still welcome, by client: nobody is asked twice at a time."""
    arrived: tuple[Task, ...] = ()
    """Done, and waiting for a commit."""
    committing: tuple[Task, ...] = ()
    """Being made into the next version."""
    abandoned: int = 0
    abandoned_in_a_row: int = 0
    failed: int = 0
    lost_in_a_row: int = 0
    """Tasks that failed since one arrived, where others are asked in place of the lost."""
    rejected: int = 0
    scores: Mapping[int, float] = NOTHING
    """What the sampler wants to know of each client that took part."""

    def to_plain(self) -> dict[str, Any]:
        """The state as JSON has it."""
        return {**self._asdict(), "in_flight": list(self.in_flight.values()), "scores": dict(self.scores)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CoordinatorState:
        """Undo `to_plain`, also after JSON made texts of numbers and lists of tuples."""
        found = dict(plain)
        for name in ("in_flight", "arrived", "committing"):
            found[name] = tuple(Task(*task) for task in found[name])
        found["in_flight"] = {task.client: task for task in found["in_flight"]}
        found["phase"] = Phase(found["phase"])
        found["scores"] = {int(client): score for client, score in found["scores"].items()}
        return cls(**found)


def everybody(client: int) -> bool:
    """Every client can be reached."""
    return True


class Begin(NamedTuple):
    """The driver is ready: those clients may be asked that can be reached now and may take part."""

    reachable: Callable[[int], bool] = everybody


class Arrived(NamedTuple):
    """Clients have done their tasks, in this order."""

    tasks: tuple[Task, ...]


class Failed(NamedTuple):
    """Clients will not do their tasks."""

    tasks: tuple[Task, ...]


class Deadline(NamedTuple):
    """The time for an attempt is over."""

    attempt: int


class Committed(NamedTuple):
    """The driver made a new version of `num_valid` updates; `num_invalid` were not finite or wrongly shaped."""

    num_valid: int
    num_invalid: int = 0
    scores: Mapping[int, float] = NOTHING
    """What the sampler wants to know of each client that took part."""


class Halt(NamedTuple):
    """Somebody wants the run to end now."""

    reason: Reason


class Send(NamedTuple):
    """Ask these clients."""

    tasks: tuple[Task, ...]


class Commit(NamedTuple):
    """Aggregate these tasks into the next version, then report Committed."""

    tasks: tuple[Task, ...]


class Reject(NamedTuple):
    """This client's work does not count."""

    task: Task
    reason: Reason


class Abandon(NamedTuple):
    """Nothing is made of this attempt."""

    attempt: int
    reason: Reason


class Finish(NamedTuple):
    """The run is over."""

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
"""The events that make sense in each phase; any other is an error and changes nothing."""


def in_full(late: int) -> float:
    """Late work counts as much as any."""
    return 1.0


class Policy(NamedTuple):
    """When clients are asked and when a commit is due."""

    num_wanted: Callable[[CoordinatorState, int], int]
    """(state, registered clients) -> how many more to ask now."""
    goal: Callable[[int], int]
    """Registered clients -> how many updates make a commit."""
    min_reports: int = 1
    """Fewer valid updates than this are not committed: the attempt is abandoned."""
    overlaps_rounds: bool = False
    """Whether tasks in flight stay welcome after a commit, as in asynchronous rounds."""
    max_abandoned: int = 100
    """So many abandoned attempts in a row end the run."""
    max_lost: int = 1000
    """So many lost tasks in a row end the run, where others are asked in place of the lost."""
    deadline: float | None = None
    """Seconds after which an attempt is closed with what has arrived."""
    staleness: Callable[[int], float] = in_full
    """How much work counts that is so many versions late."""
    interpolates: bool = False
    """Whether the model is mixed with the one client's model, rather than moved by what that client changed."""
    min_clients: int = 1
    """Fewer registered clients than this cannot run it."""


class Population(NamedTuple):
    """What a sampler may look at."""

    num_clients: int
    """How many are registered."""
    free: Callable[[int], bool]
    """Whether a client is idle, reachable and eligible."""
    sizes: Callable[[], np.ndarray]
    """How many samples each client has, (num_clients,)."""
    scores: Mapping[int, float]
    """The last known score of each client that took part before."""
    attempt: int


class Pick(NamedTuple):
    """One client that is asked, and the factor on its weight that keeps the mean unbiased."""

    client: int
    share: float = 1.0


class Sampler(NamedTuple):
    """Who is asked. `scheme` names the sampling for privacy accounting."""

    sample: Callable[[np.random.Generator, int, Population], list[Pick]]
    """(generator, how many, population) -> different clients; fewer, or none, if no more are free."""
    scheme: str
    score: Literal["", "loss", "norm"] = ""
    """What it wants to know of those who took part: their training loss, or the length of their update."""
    rate: float | None = None
    """The chance of each client to be picked, where the sampler says so; else it is how many are wanted of all."""
    draws_size: bool = False
    """Whether the number of clients is drawn too: then all who answer count, however many they are."""
    most: int | None = None
    """The most clients that it can pick at a time; None for any number."""


def no_sizes() -> np.ndarray:
    """Stand in for the sizes of clients that nobody asks for."""
    raise AtollError("coordinator: the sampler asks for the clients' sizes, but they were not given; this is a bug")


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """The machine's fixed part: policy, sampler, number of clients, number of rounds, seed."""

    policy: Policy
    sampler: Sampler
    num_clients: int
    rounds: int
    seed: int
    sizes: Callable[[], np.ndarray] = no_sizes
    secret_rng: Callable[[int], np.random.Generator] | None = None
    """Attempt -> what its cohort is drawn from, where nobody may know who was asked; else it is the seed."""

    def step(self, state: CoordinatorState, event: Event) -> Step:
        """Take one event; an event that makes no sense in this phase raises and leaves the state as it was."""
        if not isinstance(event, EXPECTED[state.phase]):
            raise AtollError(f"coordinator: {type(event).__name__} makes no sense while {state.phase}; this is a bug")
        match event:
            case Begin(reachable):
                return self._next_attempt(state, reachable)
            case Arrived(tasks):
                return self._arrived(state, tasks)
            case Failed(tasks):
                gone = _welcome(tasks, state.in_flight)
                state = state._replace(in_flight=_without(state.in_flight, gone), failed=state.failed + len(gone))
                if self.policy.overlaps_rounds:
                    state = state._replace(lost_in_a_row=state.lost_in_a_row + len(gone))
                    if state.phase is Phase.COLLECTING:
                        return self._turn(state), []  # others are asked at once in place of the lost
                return self._close_if_due(state)
            case Deadline(attempt):
                over = state.phase is Phase.COLLECTING and attempt == state.attempt
                return self._close(state) if over else (state, [])
            case Committed():
                return self._committed(state, event)
            case Halt(reason):
                return state._replace(phase=Phase.FINISHED), [Finish(reason)]

    @property
    def _goal(self) -> float:
        """How many updates make a commit."""
        everybody_counts = self.sampler.draws_size and not self.policy.overlaps_rounds
        return math.inf if everybody_counts else self.policy.goal(self.num_clients)

    def _next_attempt(self, state: CoordinatorState, reachable: Callable[[int], bool]) -> Step:
        if state.version >= self.rounds:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.ALL_ROUNDS)]
        if state.abandoned_in_a_row >= self.policy.max_abandoned:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.GAVE_UP)]
        if state.lost_in_a_row >= self.policy.max_lost:
            return state._replace(phase=Phase.FINISHED), [Finish(Reason.ALL_LOST)]
        at_work, waiting = state.in_flight, {task.client for task in state.arrived}
        num = self.policy.num_wanted(state, self.num_clients)
        picks: list[Pick] = []
        if num > 0:
            everyone = Population(
                num_clients=self.num_clients,
                free=lambda client: client not in at_work and client not in waiting and reachable(client),
                sizes=self.sizes,
                scores=state.scores,
                attempt=state.attempt,
            )
            rng = (
                generator(self.seed, "cohort", state.attempt)
                if self.secret_rng is None
                else self.secret_rng(state.attempt)
            )
            picks = self.sampler.sample(rng, num, everyone)
        tasks = tuple(Task(client, state.version, state.attempt, share) for client, share in picks)
        at_work = {**at_work, **{task.client: task for task in tasks}}
        state = state._replace(phase=Phase.COLLECTING, in_flight=at_work)
        sent: list[Command] = [Send(tasks)] if tasks else []
        state, more = self._close_if_due(state)  # a sampler may pick nobody, or enough may have arrived before
        return state, sent + more

    def _arrived(self, state: CoordinatorState, tasks: tuple[Task, ...]) -> Step:
        room = math.inf if self.policy.overlaps_rounds else self._goal - len(state.arrived)
        welcome = _welcome(tasks, state.in_flight)
        counted = welcome if len(welcome) <= room else welcome[: int(room)]
        late = set(tasks).difference(counted) if len(counted) < len(tasks) else ()
        commands = [
            Reject(task, Reason.LATE if task.attempt <= state.attempt else Reason.UNKNOWN_TASK)
            for task in tasks
            if task in late
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
        """Close the attempt when enough have arrived or nobody is left to wait for."""
        full = len(state.arrived) >= self._goal
        if state.phase is not Phase.COLLECTING or not (full or not state.in_flight):
            return state, []
        return self._close(state) if full or not self.policy.overlaps_rounds else self._abandon(state)

    def _close(self, state: CoordinatorState) -> Step:
        """End the attempt: commit what arrived, or abandon it."""
        if len(state.arrived) < self.policy.min_reports:
            return self._abandon(state)
        kept = self.policy.overlaps_rounds
        goal = self.policy.goal(self.num_clients) if kept else len(state.arrived)
        state = state._replace(
            phase=Phase.COMMITTING,
            in_flight=state.in_flight if kept else {},
            arrived=state.arrived[goal:],
            committing=state.arrived[:goal],
        )
        return state, [Commit(state.committing)]

    def _abandon(self, state: CoordinatorState) -> Step:
        command = Abandon(state.attempt, Reason.TOO_FEW)
        counted = state._replace(abandoned=state.abandoned + 1, abandoned_in_a_row=state.abandoned_in_a_row + 1)
        return self._turn(counted), [command]

    def _committed(self, state: CoordinatorState, done: Committed) -> Step:
        scores = {**state.scores, **done.scores} if done.scores else state.scores
        state = state._replace(rejected=state.rejected + done.num_invalid, scores=scores)
        if done.num_valid < self.policy.min_reports:
            return self._abandon(state)
        return self._turn(state._replace(version=state.version + 1, abandoned_in_a_row=0)), []

    def _turn(self, state: CoordinatorState) -> CoordinatorState:
        """Make ready for the next attempt; the driver begins it when it has written this state down."""
        kept = self.policy.overlaps_rounds
        return state._replace(
            phase=Phase.READY,
            attempt=state.attempt + 1,
            in_flight=state.in_flight if kept else {},
            arrived=state.arrived if kept else (),
            committing=(),
        )


def _welcome(tasks: tuple[Task, ...], in_flight: Mapping[int, Task]) -> tuple[Task, ...]:
    """Those of some tasks, each once, that are waited for."""
    return tuple(task for task in dict.fromkeys(tasks) if in_flight.get(task.client) == task)


def _without(in_flight: Mapping[int, Task], gone: tuple[Task, ...]) -> dict[int, Task]:
    """What is in flight without some that are."""
    left = dict(in_flight)
    for task in gone:
        del left[task.client]
    return left
