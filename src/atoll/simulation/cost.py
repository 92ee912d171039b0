"""What a round costs: seconds and memory of large cohorts, from rounds of two small ones on the same engine.

A synchronous round of C clients on w workers that train s clients as one takes

    seconds = a + b * ceil(ceil(C / s) / w)

where b is the time of one group of s clients and a that of everything that happens once a round: making and sending
the broadcast, the rule, the server's step, the metrics row. Both are measured: the plan runs some rounds with cohorts
of about 4 and 8 groups, with the engine, stack and workers of the plan itself.

Memory is the peak of these rounds. So that it is that of a run, the plan is built once, its rounds ask fewer or more
clients in turn, each goes on from the state of the last, and of a past round nothing is held but numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import active_children
from statistics import median
from typing import NamedTuple

from atoll.commit.guard import Guard
from atoll.commit.parts import RunParts, build_parts, open_ledger
from atoll.commit.run_state import RunState
from atoll.core.coordinator import FAILURES, Coordinator, CoordinatorState, Policy
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.engine.base import Engine
from atoll.engine.build import build_engine
from atoll.simulation.driver import Simulation
from atoll.train.federation import build_federation
from atoll.train.job import Job
from atoll.train.resident import forget_peak, own_peak_memory, peak_memory

ROUNDS, MOST_ROUNDS, SECONDS = 3, 20, 4.0
"""Timed rounds of each small cohort after a first that warms up: at least, at most, and seconds that they may take."""
GROUPS = (4, 8)
"""Groups of clients in the two small cohorts, at least, and for each worker a half and one."""
ALL_ROUNDS = len(GROUPS) * (MOST_ROUNDS + 1) + 1
"""Rounds of all small cohorts at most, and one more, since the last of a run is evaluated."""
KEPT = 2
"""Copies of all updates that a rule needs which sees each of them."""


class RoundCost(NamedTuple):
    """What a round of a plan costs on this machine, without evaluation."""

    num_clients: int
    """Clients of a round."""
    num_workers: int
    """Worker processes; 0 where one process does everything."""
    stack: int
    """Clients that are trained as one; 0 where each is trained alone."""
    once: float
    """Seconds that a round takes whatever the cohort."""
    group: float
    """Seconds that a worker takes for one group of clients."""
    seconds: float
    """Seconds a round."""
    memory: int
    """Bytes of resident memory of the process that drives the run, at the most; what this one held before counts."""
    worker_memory: int
    """Bytes of resident memory of its largest worker, most of which all workers share; 0 without workers."""
    bytes_down: float
    """Bytes sent to clients a round."""
    bytes_up: float
    """Bytes sent by clients a round."""


class Row(NamedTuple):
    """What one round took and sent."""

    seconds: float
    bytes_down: int
    bytes_up: int


class Sample(NamedTuple):
    """Rounds of a small cohort."""

    num_clients: int
    seconds: float
    bytes_down: float
    bytes_up: float


def round_cost(plan: Plan) -> RoundCost:
    """Return what a round of a plan costs here, measured on cohorts that are smaller than the plan's where it is large.

    Rules that see every update take memory for all of them, and time that grows faster than the cohort: the time of
    these is that of the small cohorts' rule, in proportion.
    """
    if plan.policy.name not in ("", "cohort"):
        raise PlanError(
            f'the cost of a round is known for policy "cohort" alone, and this plan has "{plan.policy.name}": '
            "run a few versions of it, whose seconds are in metrics.jsonl"
        )
    if plan.split is not None:
        raise PlanError("the cost of a round with [split] is told by atoll compare: use that")
    forget_peak()
    whole = _built(plan)
    engine, job, num_clients = whole.engine, whole.job, _asked(whole.coordinator)
    try:
        stack, num_workers = engine.trainer.stack, engine.num_workers
        size, workers = max(1, stack), max(1, num_workers)
        sizes = _sizes(num_clients, _least(whole), size, workers)
        samples = _samples([_smaller(whole, each) for each in sizes])
        worker_memory = max([0, *(peak_memory(worker.pid) for worker in active_children())])
        memory = own_peak_memory()
    finally:
        engine.close()
    once, group = line_of(samples, size, workers)
    largest = samples[-1]
    more = (num_clients - largest.num_clients) * job.spec.num_params * job.spec.dtype.itemsize
    scale = num_clients / largest.num_clients
    return RoundCost(
        num_clients=num_clients,
        num_workers=num_workers,
        stack=stack,
        once=once,
        group=group,
        seconds=once + group * turns_of(num_clients, size, workers),
        memory=memory + (KEPT * more if job.wants_rows else 0),
        worker_memory=worker_memory,
        bytes_down=scale * largest.bytes_down,
        bytes_up=scale * largest.bytes_up,
    )


def _built(plan: Plan) -> RunParts:
    """Return the parts of a plan that runs for long enough, evaluates nothing, and has no limit but its rounds."""
    longer = plan.replace({"evaluation.every": 0, "evaluation.clients_every": 0, "stop": None, "rounds": ALL_ROUNDS})
    rounds = min(max(1, plan.rounds), MOST_ROUNDS)

    def engine(job: Job, coordinator: Coordinator) -> Engine:
        return build_engine(longer.engine, job, coordinator, ALL_ROUNDS - rounds)  # it may prepare for those left

    parts = build_parts(longer, build_federation(longer), open_ledger(longer, None, begun=False), engine)
    guard = parts.guard
    if guard is None or guard.mechanism.epsilon is None:
        return parts
    free = guard.mechanism._replace(epsilon=None)  # nothing is released, so that no budget ends the rounds
    return replace(parts, guard=Guard(parts.job, free, guard.exposure(0), guard.ledger))


def _asked(coordinator: Coordinator) -> int:
    """Return how many clients a round asks."""
    return coordinator.policy.num_wanted(CoordinatorState(), coordinator.num_clients)


def _least(whole: RunParts) -> int:
    """Return how many clients a round needs, for its rule or for the sums of its groups."""
    secure = whole.job.secure
    if secure is None:
        return whole.job.aggregator.min_updates
    return secure.settings.groups * (secure.settings.required_survivors + 1)


def _sizes(num_clients: int, least: int, size: int, workers: int) -> list[int]:
    """Return how many clients the small cohorts have: fewer and more, but no more than the plan's."""
    groups = sorted(max(num, num * workers // GROUPS[1]) for num in GROUPS)
    return sorted({min(num_clients, max(size * num, least * times)) for times, num in enumerate(groups, start=1)})


def _smaller(whole: RunParts, size: int) -> RunParts:
    """Return the parts of the plan, all but the policy the same objects, with a cohort of this size."""
    policy: Policy = whole.plan.replace({"policy": {"name": "cohort", "size": size}}).policy.build("rounds")
    least = 1 if whole.job.secure is not None else whole.job.aggregator.min_updates
    if whole.guard is not None and whole.guard.mechanism.min_reports is not None:
        least = whole.guard.mechanism.min_reports(size)
    return replace(whole, coordinator=replace(whole.coordinator, policy=policy._replace(min_reports=least)))


def _samples(parts: Sequence[RunParts]) -> list[Sample]:
    """Run rounds of several cohorts in turns, so that a busy machine is busy for all; return what one of each takes."""
    state: RunState | None = None
    rows: list[list[Row]] = [[] for _ in parts]
    while len(rows[0]) <= ROUNDS or (len(rows[0]) <= MOST_ROUNDS and sum(row.seconds for row in rows[-1]) < SECONDS):
        for each, some in zip(parts, rows, strict=True):
            state, row = _round(each, state)
            some.append(row)
    return [_sample(each, some[1:]) for each, some in zip(parts, rows, strict=True)]


def _round(parts: RunParts, state: RunState | None) -> tuple[RunState, Row]:
    """Run one round from a state, the first one if there is none; return the next state and what the round took."""
    simulation = Simulation(parts, state)
    before = simulation.state
    seconds, bytes_down, bytes_up = before.seconds, before.bytes_down, before.bytes_up
    if next(simulation.rounds(), None) is None:
        reason = simulation.reason
        remedy = FAILURES.get(reason) if reason else None
        raise PlanError(
            f"the cost is measured on rounds of {_asked(parts.coordinator)} clients, and these end after "
            f"{before.coordinator.version} ({reason}): {remedy or 'run a few rounds of the plan itself'}"
        )
    after = simulation.state
    return after, Row(after.seconds - seconds, after.bytes_down - bytes_down, after.bytes_up - bytes_up)


def _sample(parts: RunParts, rows: Sequence[Row]) -> Sample:
    """Return how long a round takes, and what it sends, by some of them."""
    down, up = sum(row.bytes_down for row in rows) / len(rows), sum(row.bytes_up for row in rows) / len(rows)
    return Sample(_asked(parts.coordinator), median(row.seconds for row in rows), down, up)


def turns_of(num_clients: int, size: int, workers: int) -> int:
    """Return how many groups the busiest worker trains."""
    return math.ceil(math.ceil(num_clients / size) / workers)


def line_of(samples: Sequence[Sample], size: int, workers: int) -> tuple[float, float]:
    """Return the seconds of a round with no group, and those of a group, by the line through two cohorts."""
    few, many = samples[0], samples[-1]
    turns = [turns_of(each.num_clients, size, workers) for each in (few, many)]
    if turns[0] == turns[1]:
        return 0.0, many.seconds / turns[1]
    group = max(0.0, (many.seconds - few.seconds) / (turns[1] - turns[0]))
    return max(0.0, many.seconds - group * turns[1]), group
