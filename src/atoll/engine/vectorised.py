"""Many clients as one, in this process."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.options import Count
from atoll.engine.base import COMPILING, Engine, InProcess, Stack, stack_size, unheard
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def vectorised(
    job: Job,
    cohort: Count = 10,
    stack: Stack | None = None,
    compile: bool = False,
    tell: Callable[[str], None] = unheard,
) -> Engine:
    """Stack clients and train them in one mapped step; models that cannot be stacked go one after another.

    `cohort` is how many clients a round will have; `stack` overrides how many are stacked; `compile` hands the recorded
    step to torch.compile.
    """
    size = stack if stack is not None else stack_size(job, cohort)
    trainer = Trainer(job, stack=size, compile=compile)
    if trainer.stack and trainer.compile:
        tell(COMPILING)
    return InProcess(job, trainer)
