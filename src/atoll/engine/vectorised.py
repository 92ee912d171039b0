"""Many clients as one, in this process."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.options import Count
from atoll.engine.base import Engine, Stack, in_process, place_of, stack_size, trainer_of, unheard
from atoll.train.devices import CPU, Precision
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def vectorised(
    job: Job,
    cohort: Count = 10,
    stack: Stack | None = None,
    compile: bool = False,
    kernels: bool = False,
    device: str = CPU,
    precision: Precision = "float32",
    tf32: bool = False,
    tell: Callable[[str], None] = unheard,
) -> Engine:
    """Stack clients and train them in one mapped step; models that cannot be stacked go one after another.

    `cohort` is how many clients a round will have; `stack` overrides how many are stacked; `compile` hands the recorded
    step to torch.compile. `kernels` trains chains of linear and convolutional layers by kernels in C. `device`,
    `precision` and `tf32` are as of the engine `inline`.
    """
    place = place_of(job, device, precision, tf32)

    def trainer() -> Trainer:
        size = stack if stack is not None else stack_size(job, cohort, place)
        return trainer_of(job, size, compile, kernels, tell, place)

    return in_process(job, place, trainer)
