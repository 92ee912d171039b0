"""Measure, then choose."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Annotated

from atoll.core.options import Count, at_least
from atoll.core.plan import Plan
from atoll.engine.base import (
    BUILDING,
    COMPILING,
    Engine,
    InProcess,
    Workers,
    place_of,
    rehearse,
    single_threaded,
    stack_size,
    unheard,
    worker_count,
)
from atoll.engine.processes import Processes, devices_of, processes
from atoll.engine.vectorised import vectorised
from atoll.train.devices import CPU, Precision
from atoll.train.job import Job
from atoll.train.kernels.build import Unavailable, is_built
from atoll.train.trainer import Trainer

SMALL = 32
"""Up to batches of this size kernels are taken without timing; libraries catch up with larger ones."""
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
    device: str = CPU,
    precision: Precision = "float32",
    tf32: bool = False,
    tell: Callable[[str], None] = unheard,
    plan: Plan | None = None,
) -> Engine:
    """Take the fastest way to train, and use as many processes as there are cores.

    Kernels are taken where they know the model; other jobs are timed for a few steps, one by one and stacked.

    A step is compiled if the run is long enough to repay it and the compiled step proves faster. The choice is written
    into the run directory, so that a resumed run repeats it. On a device, clients are stacked as its memory allows,
    with a worker process for each of several devices; `device`, `precision` and `tf32` are as of the engine `inline`.
    """
    place = place_of(job, device, precision, tf32)
    if not place.is_plain:
        spread = workers != 1 and len(devices_of(place, workers)) > 1
        options = {"device": place.device, "precision": precision, "tf32": place.tf32}
        if spread:
            return processes(job, cohort, workers, tell=tell, plan=plan, **options)  # type: ignore[arg-type]
        return vectorised(job, cohort, tell=tell, **options)  # type: ignore[arg-type]
    num_workers = worker_count(workers)
    with single_threaded():
        fast = _with_kernels(job, cohort, tell)
        trainer, seconds = (fast, 0.0) if fast.kernels and job.batch_size <= SMALL else _faster(job, cohort, fast)
        steps = sum(job.num_steps(client) for client in range(min(cohort, job.federation.num_clients)))
        if trainer.stack and not trainer.kernels and rounds * steps * seconds / num_workers > WORTH_COMPILING:
            tell(COMPILING)
            trainer = _compiled(job, trainer, seconds)
    if num_workers > 1 and cohort > max(1, trainer.stack) and hasattr(os, "fork"):
        return Processes(job, trainer, num_workers)
    return InProcess(job, trainer)


def _with_kernels(job: Job, cohort: int, tell: Callable[[str], None]) -> Trainer:
    """Return a trainer with kernels, or one without that says why it has none."""
    size = stack_size(job, cohort)
    if not is_built():
        tell(BUILDING)
    try:
        return Trainer(job, stack=size, kernels=True)
    except Unavailable as error:
        trainer = Trainer(job, stack=size)
        trainer.slow_because = str(error)
        return trainer


def _faster(job: Job, cohort: int, first: Trainer) -> tuple[Trainer, float]:
    """Whichever takes less time a client and step, one by one, stacked or with kernels, and that time."""
    alone, together = Trainer(job), Trainer(job, stack=stack_size(job, cohort)) if first.kernels else first
    alone.slow_because = together.slow_because = first.slow_because
    if not first.stack:
        return first, 0.0  # there is no choice, so nothing is timed
    by_one, stacked = _seconds(alone), _seconds(together) if together.stack else math.inf
    chosen = (alone, by_one) if by_one * MARGIN < stacked else (together, stacked)
    if first.kernels and (with_kernels := _seconds(first)) < chosen[1]:
        return first, with_kernels
    if first.kernels:
        chosen[0].slow_because = "recorded steps or the plain loop are faster for batches as large as these"
    return chosen


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
