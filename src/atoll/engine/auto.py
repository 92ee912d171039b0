"""Measure, then choose."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from atoll.core.errors import AtollError
from atoll.core.messages import Broadcast, Task
from atoll.engine.base import Engine, InProcess, stack_size
from atoll.engine.processes import Processes
from atoll.train.job import Job
from atoll.train.trainer import Trainer

PROBE_STEPS = 8
PROBE_SECONDS = 0.15
MARGIN = 1.2
"""One by one must be this much faster than stacked to be chosen, so that noise does not decide."""


def auto(job: Job, cohort: int = 10, workers: int | None = None) -> Engine:
    """Time a few steps one by one and stacked, take the faster way, and use as many processes as there are cores.

    The choice is written into the run directory, so that a resumed run repeats it.
    """
    num_workers = workers if workers is not None else len(os.sched_getaffinity(0))
    trainer = _faster(job, cohort)
    if num_workers > 1 and cohort > trainer.stack and hasattr(os, "fork"):
        return Processes(job, trainer, num_workers, compile=False)
    settings: dict[str, object] = {"name": "vectorised", "stack": trainer.stack, "compile": False}
    return InProcess(job, trainer, settings if trainer.stack > 1 else {"name": "inline"})


def _faster(job: Job, cohort: int) -> Trainer:
    """Train some clients for a few steps one by one and stacked, and keep the way that takes less time a client."""
    alone, together = Trainer(job), Trainer(job, stack=stack_size(job, cohort))
    if together.stack == 1:
        return alone
    clients = min(together.stack, job.federation.num_clients)
    try:
        stacked = _seconds(job, together, clients) / clients
    except AtollError:
        raise
    except Exception:  # a model may hold operations that cannot be mapped over clients: then there is no choice
        return alone
    return alone if _seconds(job, alone, 1) * MARGIN < stacked else together


def _seconds(job: Job, trainer: Trainer, num_clients: int) -> float:
    """Seconds for a few steps of some clients: the least of several timings, after one that warms up."""
    trainer.rebind(replace(job, local=replace(job.local, epochs=None, steps=PROBE_STEPS), attack=None))
    tasks = [Task(client, 0, 0) for client in range(num_clients)]
    sent = {0: Broadcast(job.first_D, job.algorithm.broadcast(job.first_D, job.algorithm.init_server(job.first_D)))}
    trainer.train(tasks, sent, {})
    times: list[float] = []
    while len(times) < 3 or sum(times) < PROBE_SECONDS:
        started = time.perf_counter()
        trainer.train(tasks, sent, {})
        times.append(time.perf_counter() - started)
    trainer.rebind(job)
    return min(times)
