"""One client after another, in this process: the readable reference."""

from __future__ import annotations

from atoll.engine.base import Engine, in_process, place_of
from atoll.train.devices import CPU, Precision
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def inline(job: Job, device: str = CPU, precision: Precision = "float32", tf32: bool = False) -> Engine:
    """Train one client after another with a plain PyTorch loop.

    `device` is where: "cpu", "cuda", "cuda:1", "mps", another device of torch, or "auto" for the first accelerator that
    is there; `precision` and `tf32` say how exactly models compute.
    """
    place = place_of(job, device, precision, tf32)
    return in_process(job, place, lambda: Trainer(job, place=place))
