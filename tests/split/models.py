"""Models, data and plans of the tests of split learning."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers import phrases
from torch import Tensor, nn

from atoll import Plan
from atoll.data.dataset import Dataset


class Named(nn.Module):
    """A user's model: named parts in order, a block with a skip, and functions between them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.pool1 = nn.MaxPool2d(2)
        self.block = Block(4)
        self.scale = nn.Parameter(torch.ones(1))
        self.fc = nn.Linear(64, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool1(torch.relu(self.conv1(x))))
        x = torch.relu(self.fc(x.reshape(x.size(0), -1))) * self.scale
        scores: Tensor = self.out(x)
        return scores


class Block(nn.Module):
    """A convolution that is added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(x))


def named(num_classes: int) -> nn.Module:
    return Named(num_classes)


def named_sequence(num_classes: int) -> nn.Module:
    """A sequential model whose layers have names."""
    layers = {"flat": nn.Flatten(), "first": nn.Linear(64, 12), "act": nn.ReLU(), "middle": nn.Linear(12, 12)}
    layers |= {"head": nn.Linear(12, num_classes)}
    return nn.Sequential(OrderedDict(layers))


def normed_sequence(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, num_classes),
    )


def dropped_sequence(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.Dropout(0.2),
        nn.Linear(12, num_classes),
    )


def images(shape: tuple[int, ...] = (1, 28, 28), num: int = 60) -> Dataset:
    """Random images of ten classes."""
    rng = np.random.default_rng(0)
    x, y = rng.random((num, *shape), dtype=np.float32), rng.integers(0, 10, num)
    return Dataset(name="noise", train_x=x, train_y=y, test_x=x[:20], test_y=y[:20], num_classes=10)


def padded() -> Dataset:
    """Short texts whose first places count for nothing."""
    whole = phrases()
    y, test_y = whole.train_y.copy(), whole.test_y.copy()
    y[:, :2] = test_y[:, :2] = -100
    return replace(whole, name="padded", train_y=y, test_y=test_y, problem="tokens")


def plan_of(split: dict[str, Any] | None = None, num_clients: int = 1, **fields: Any) -> Plan:
    """A short plan of some clients, cut if `split` is given."""
    settings: dict[str, Any] = {
        "partition": {"num_clients": num_clients},
        "policy": {"size": num_clients},
        "model": "mlp_2nn",
        "rounds": 1,
        "local": {"steps": 3, "batch_size": 10, "lr": 0.05, "optimizer": {"name": "sgd", "momentum": 0.9}},
        "engine": "inline",
        **fields,
    }
    return Plan(**settings, **({} if split is None else {"split": split}))
