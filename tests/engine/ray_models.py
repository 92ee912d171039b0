"""Models that trouble the workers of a Ray cluster which build and train them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn


def in_worker() -> bool:
    """Whether this is a worker of Ray, which the driver is not."""
    ray = sys.modules.get("ray")
    return ray is not None and ray._private.worker.global_worker.mode == ray.WORKER_MODE


class Deadly(nn.Module):
    """Ends workers by SIGKILL in the middle of training: as many as the file has letters, or all of them."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layers, self._path = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), Path(path)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and in_worker() and self._path.exists():
            left = self._path.read_text()
            if left != "all":
                self._path.write_text(left[1:])
            if left:
                os.kill(os.getpid(), signal.SIGKILL)
        scores: Tensor = self.layers(x)
        return scores


def deadly(path: str) -> nn.Module:
    """The factory that plans name as engine.ray_models:deadly."""
    return Deadly(path)


def elsewhere_other(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Another model in workers than in the process that began the run."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4 + in_worker()), nn.Linear(4 + in_worker(), num_classes))


def raising(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A model that cannot train in a worker."""

    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and self.training and in_worker():
                raise ArithmeticError("one number too many")
            scores: Tensor = self.layer(x.flatten(1))
            return scores

    return Raising()
