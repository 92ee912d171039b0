"""Algorithms, models and attacks that record what is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.algorithm import Algorithm, LocalTask, ServerTask
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Aggregate, State, Update
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset

CHANGED = {"now": False}


def changing() -> Dataset:
    """Return digits that change when a test sets a flag."""
    dataset = digits()
    return replace(dataset, train_x=dataset.train_x[::-1].copy()) if CHANGED["now"] else dataset


def ragged(sizes: list[int]) -> Dataset:
    """Return data whose owners have these numbers of samples."""
    x, owners = np.zeros((sum(sizes), 4), np.float32), np.repeat(np.arange(len(sizes)), sizes)
    y = np.arange(len(x)) % 2
    return Dataset(name="ragged", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2, owners=owners)


class Wide(nn.Module):
    """A model in double precision, so that whole steps of a grid can be read off what is released."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.out = nn.Parameter(torch.zeros(64, 10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = x.flatten(1).double() @ self.out + 0 * self.w.sum()
        return scores


def wide(size: int) -> nn.Module:
    return Wide(size)


def watching(seen: list[Aggregate], send: Callable[[Tensor], Tensor] = torch.zeros_like) -> Callable[[], Algorithm]:
    """An algorithm whose clients send `send(delta)`, and whose server keeps the model and notes what is released."""

    def watched() -> Algorithm:
        def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
            return Update(send(delta_D), task.num_samples, {}), {}

        def server_step(
            params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask
        ) -> tuple[Tensor, State]:
            seen.append(aggregate)
            return params_D, server

        return Algorithm(finish=finish, server_step=server_step)

    return watched


def broken(value: Any) -> Attack:
    """Bad clients send an update full of one number, such as NaN."""

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=torch.full_like(honest.delta_D, value))

    return Attack(update=update)
