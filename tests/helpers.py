"""Models and comparisons that tests share."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Aggregate, State, Update
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset
from atoll.train.kernels.build import Unavailable, library


class Normed(nn.Module):
    """A model with batch norm, dropout of two kinds, and a convolution."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.2)
        self.out = nn.Linear(4 * input_shape[1] * input_shape[2], num_classes)

    def forward(self, x: Any) -> Any:
        return self.out(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Normed(input_shape, num_classes)


def dropped(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    features = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, num_classes))


def convolutions(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 5, 2, bias=False, dilation=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 2 * 2, num_classes),
    )


def grouped(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, num_classes)
    )


def batch_normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Batch norm over features, which cannot do with one sample."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))


def normalised(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Layer, instance and RMS norm, and dropout, in one model."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(4 * 36),
        nn.Dropout(0.2),
        nn.Linear(4 * 36, 8),
        nn.RMSNorm(8),
        nn.Linear(8, num_classes),
    )


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(input_shape[-1], 6, batch_first=True)
        self.out = nn.Linear(6, num_classes)

    def forward(self, x: Any) -> Any:
        return self.out(self.rnn(x.flatten(1, -2))[0][:, -1])


def recurrent(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Recurrent(input_shape, num_classes)


def phrases() -> Dataset:
    """Short texts over eight letters, each followed by the next letter."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 8, size=(300, 1)) + np.arange(7)
    x = (text % 8).astype(np.uint8)
    return Dataset(
        name="phrases",
        train_x=x[:240, :-1],
        train_y=x[:240, 1:].astype(np.int64),
        test_x=x[240:, :-1],
        test_y=x[240:, 1:].astype(np.int64),
        num_classes=8,
        tokens=True,
    )


class Quadratic(nn.Module):
    """A model whose outputs are losses: 0.5 * sum(a (w - c)^2) for a sample that holds centre c and curvature a."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        centre, curvature = x.chunk(2, dim=1)
        loss = (0.5 * curvature * (self.w - centre) ** 2).sum(1)
        return torch.stack([loss, torch.zeros_like(loss)], dim=1)


def quadratic(input_shape: tuple[int, ...]) -> nn.Module:
    return Quadratic(input_shape[0] // 2)


def first_output(outputs: Any, y: Any) -> Any:
    return outputs[:, 0]


def quadratics(num_clients: int = 10, size: int = 4, num_samples: int = 1) -> Dataset:
    """A quadratic for each client, with its own centre and curvature; `num_samples` copies of it."""
    rng = np.random.default_rng(5)
    centre = rng.normal(size=(num_clients, size))
    x = np.concatenate([centre, rng.uniform(0.5, 2.0, size=(num_clients, size))], axis=1).astype(np.float32)
    x, owners = x.repeat(num_samples, axis=0), np.arange(num_clients).repeat(num_samples)
    y = np.zeros(len(x), dtype=np.int64)
    y[0] = 1
    return Dataset(name="quadratics", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2, owners=owners)


def optimum(dataset: Dataset) -> Any:
    """The minimum of the mean of all samples' quadratics."""
    centre, curvature = np.split(dataset.train_x.astype(np.float64), 2, axis=1)
    return torch.from_numpy((curvature * centre).sum(0) / curvature.sum(0))


def hashed_keep(seed: int, place: int, count: int, p: float) -> list[bool]:
    """Which of `count` values a dropout layer keeps: splitmix64 with arithmetic shifts, in Python's integers."""
    mask = (1 << 64) - 1

    def shifted(number: int, by: int) -> int:
        return ((number - (1 << 64) if number >> 63 else number) >> by) & mask

    def mixed(value: int) -> int:
        value = (value ^ shifted(value, 30)) * -0x40A7B892E31B1A47 & mask
        value = (value ^ shifted(value, 27)) * -0x6B2FB644ECCEEE15 & mask
        return value ^ shifted(value, 31)

    key = mixed((seed + place * 0x632BE59BD9B4E019) & mask)
    bits = [mixed((number * 0x61C8864680B583EB + key) & mask) >> 16 & 0xFFFFFF for number in range(count)]
    return [each >= int(p * 0x1000000) for each in bits]


FRAME = 26
"""Bytes that a packed vector takes beside its values."""


def rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return timeless(found)


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without this machine's seconds."""
    return [{key: value for key, value in row.items() if key not in ("seconds", "round_seconds")} for row in history]


def assert_same_end(path: Path, whole: Path) -> None:
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert rows(path) == rows(whole)
    for name in ("clients.json", "confusion.json", "partition.json"):
        assert (path / name).read_text() == (whole / name).read_text()


def upside_down() -> Dataset:
    """Digits that stand on their heads: another data set of the same shape."""
    dataset = digits()
    return replace(dataset, name="upside down", train_x=dataset.train_x[:, :, ::-1], test_x=dataset.test_x[:, :, ::-1])


def breaks() -> Attack:
    """An attack that fails."""

    def update(honest: Update, known: Knowledge) -> Update:
        raise ValueError("no more")

    return Attack(update=update)


def stops(mark: str, attempt: int, number: int = 1, kill: bool = False) -> Attack:
    """An attack that changes nothing, but stops all runs once: when so many runs have come to an attempt.

    They are counted in the file `mark`. Ctrl-C goes to the process that started this one, or a kill to all.
    """

    def update(honest: Update, known: Knowledge) -> Update:
        if known.attempt == attempt:
            with Path(mark).open("a") as file:
                file.write("x")
            if Path(mark).stat().st_size == number:
                os.killpg(0, signal.SIGKILL) if kill else os.kill(os.getppid(), signal.SIGINT)
        return honest

    return Attack(update=update)


def overflowing(after: int) -> Algorithm:
    """Average as ever, and overflow after some rounds."""

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + aggregate.delta_D * (1e39 if task.round >= after else 1.0), server

    return Algorithm(server_step=server_step)


def with_kernels() -> dict[str, bool]:
    """Return the setting of an engine that trains by kernels, or none where they cannot be compiled."""
    try:
        library()
    except Unavailable:
        return {}
    return {"kernels": True}
