"""Measure, then choose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

from atoll.core.options import Count, at_least
from atoll.engine.base import COMPILING, Engine, InProcess, Workers, rehearse, stack_size, unheard, worker_count
from atoll.engine.processes import Processes
from atoll.train.job import Job
from atoll.train.trainer import Trainer

PROBE_STEPS = 8
PROBE_SECONDS = 0.15
MARGIN = 1.2
"""One by one, or compiled, must be this much faster than stacked to be chosen, so that noise does not decide."""
WORTH_COMPILING = 120.0
"""Seconds of training ahead from which on compiling is tried; it takes five to thirty."""


def auto(
    job: Job,
    cohort: Count = 10,
    workers: Workers | None = None,
    rounds: Annotated[int, at_least(0)] = 1,
    tell: Callable[[str], None] = unheard,
) -> Engine:
    """Time a few steps one by one and stacked, take the faster way, and use as many processes as there are cores.

    A step is compiled if the run is long enough to repay it and the compiled step proves faster. The choice is written
    into the run directory, so that a resumed run repeats it.
    """
    num_workers = worker_count(workers)
    trainer, seconds = _faster(job, cohort)
    steps = sum(job.num_steps(client) for client in range(min(cohort, job.federation.num_clients)))
    if trainer.stack and rounds * steps * seconds / num_workers > WORTH_COMPILING:
        tell(COMPILING)
        trainer = _compiled(job, trainer, seconds)
    if num_workers > 1 and cohort > max(1, trainer.stack) and hasattr(os, "fork"):
        return Processes(job, trainer, num_workers)
    return InProcess(job, trainer)


def _faster(job: Job, cohort: int) -> tuple[Trainer, float]:
    """Whichever takes less time a client and step, one by one or stacked, and that time."""
    alone, together = Trainer(job), Trainer(job, stack=stack_size(job, cohort))
    if not together.stack:
        return together, 0.0  # there is no choice, so nothing is timed
    by_one, stacked = _seconds(alone), _seconds(together)
    return (alone, by_one) if by_one * MARGIN < stacked else (together, stacked)


def _compiled(job: Job, trainer: Trainer, seconds: float) -> Trainer:
    """The same trainer with a compiled step, if there is a compiler and it helps."""
    candidate = Trainer(job, stack=trainer.stack, compile=True)
    try:
        return candidate if _seconds(candidate) * MARGIN < seconds else trainer
    except Exception:  # no compiler, or one that fails: compiling is never needed
        return trainer


def _seconds(trainer: Trainer) -> float:
    """Seconds a client and step: the least of several timings, after a first that warms up."""
    num_clients = rehearse(trainer, PROBE_STEPS)
    times: list[float] = []
    while len(times) < 3 or sum(times) < PROBE_SECONDS:
        started = time.perf_counter()
        rehearse(trainer, PROBE_STEPS)
        times.append(time.perf_counter() - started)
    return min(times) / num_clients / PROBE_STEPS
