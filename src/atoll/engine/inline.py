"""One client after another, in this process: the readable reference."""

from __future__ import annotations

from atoll.engine.base import Engine, InProcess
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def inline(job: Job) -> Engine:
    """Train one client after another with a plain PyTorch loop."""
    return InProcess(job, Trainer(job))
