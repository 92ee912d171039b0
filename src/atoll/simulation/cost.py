"""What a round costs: seconds and memory of large cohorts, from rounds of two small ones on the same engine.

A synchronous round of C clients on w workers that train s clients as one takes

    seconds = a + b * ceil(ceil(C / s) / w)

where b is the time of one group of s clients and a that of everything that happens once a round: making and sending
the broadcast, the rule, the server's step, the metrics row. Both are measured: the plan runs some rounds with cohorts
of about 4 and 8 groups, with the engine, stack and workers of the plan itself.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll.commit.parts import RunParts, build_parts, open_ledger
from atoll.commit.run_state import RunState
from atoll.core.coordinator import Coordinator, CoordinatorState
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.engine.build import build_engine
from atoll.privacy.ledger import Ledger
from atoll.simulation.driver import Simulation
from atoll.train.federation import Federation, build_federation

ROUNDS, MOST_ROUNDS, SECONDS = 3, 20, 4.0
"""Timed rounds of each small cohort after a first that warms up: at least, at most, and seconds that they may take."""
GROUPS = (4, 8)
"""Groups of clients in the two small cohorts, at least, and for each worker a half and one."""
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
    """Bytes of resident memory of the process that drives the run, at the most."""
    worker_memory: int
    """Bytes of resident memory of its largest worker, most of which all workers share; 0 without workers."""
    bytes_down: float
    """Bytes sent to clients a round."""
    bytes_up: float
    """Bytes sent by clients a round."""


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
    plan = plan.replace({"evaluation.every": 0, "evaluation.clients_every": 0, "stop": None, "rounds": MOST_ROUNDS + 2})
    federation = build_federation(plan)
    ledger = open_ledger(plan, None, begun=False)
    whole = build_parts(plan, federation, ledger, lambda job, asked: build_engine(plan.engine, job, asked))
    engine, job, num_clients = whole.engine, whole.job, _asked(whole.coordinator)
    try:
        stack, num_workers = engine.trainer.stack, engine.num_workers
        size, workers = max(1, stack), max(1, num_workers)
        groups = sorted({max(num, num * workers // GROUPS[1]) for num in GROUPS})
        sizes = sorted({min(num_clients, size * num) for num in groups})
        samples = _samples([_smaller(whole, federation, ledger, each) for each in sizes])
        worker_memory = max([0, *(peak_memory(worker.pid) for worker in active_children())])
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
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (KEPT * more if job.wants_rows else 0),
        worker_memory=worker_memory,
        bytes_down=scale * largest.bytes_down,
        bytes_up=scale * largest.bytes_up,
    )


def _smaller(whole: RunParts, federation: Federation, ledger: Ledger | None, size: int) -> RunParts:
    """Return the parts of the plan with a smaller cohort, on the same engine."""
    plan = whole.plan.replace({"policy": {"name": "cohort", "size": size}})
    own = None if ledger is None else Ledger(ledger.secret)
    return build_parts(plan, federation, own, lambda job, coordinator: whole.engine)


def _asked(coordinator: Coordinator) -> int:
    """Return how many clients a round asks."""
    return coordinator.policy.num_wanted(CoordinatorState(), coordinator.num_clients)


def _samples(parts: Sequence[RunParts]) -> list[Sample]:
    """Run rounds of several cohorts in turns, so that a busy machine is busy for all; return what one of each takes."""
    simulations = [Simulation(each) for each in parts]
    rounds = [simulation.rounds() for simulation in simulations]
    states: list[list[RunState]] = [[] for _ in parts]
    while len(states[0]) <= ROUNDS or (len(states[0]) <= MOST_ROUNDS and states[-1][-1].seconds < SECONDS):
        for simulation, each, seen in zip(simulations, rounds, states, strict=True):
            if next(each, None) is None:
                raise PlanError(
                    f"the plan ends after {len(seen)} rounds: let it run for {MOST_ROUNDS}, to measure them"
                )
            seen.append(simulation.state)
    return [_sample(each, seen) for each, seen in zip(parts, states, strict=True)]


def _sample(parts: RunParts, states: Sequence[RunState]) -> Sample:
    """Return how long a round takes, and what it sends, by the states after some of them."""
    seconds = median(after.seconds - before.seconds for before, after in pairwise(states))
    first, last, num = states[0], states[-1], len(states) - 1
    down, up = (last.bytes_down - first.bytes_down) / num, (last.bytes_up - first.bytes_up) / num
    return Sample(_asked(parts.coordinator), seconds, down, up)


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


def peak_memory(pid: int | None) -> int:
    """Return the most bytes that a process had in memory; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
