"""Many clients as one, in this process."""

from __future__ import annotations

from atoll.core.options import Count
from atoll.engine.base import Engine, InProcess, Stack, stack_size
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def vectorised(job: Job, cohort: Count = 10, stack: Stack | None = None, compile: bool = False) -> Engine:
    """Stack clients and train them in one mapped step; models that cannot be stacked go one after another.

    `cohort` is how many clients a round will have; `stack` overrides how many are stacked; `compile` hands the recorded
    step to torch.compile.
    """
    size = stack if stack is not None else stack_size(job, cohort)
    return InProcess(job, Trainer(job, stack=size, compile=compile))
