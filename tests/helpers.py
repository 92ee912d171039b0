"""Models and comparisons that tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn


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


def rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


def assert_same_end(path: Path, whole: Path) -> None:
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert rows(path) == rows(whole)
    for name in ("clients.json", "confusion.json", "partition.json"):
        assert (path / name).read_text() == (whole / name).read_text()
