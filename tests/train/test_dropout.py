"""Dropout by hashed masks: any number of layers, and the same masks in every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hashed_keep
from torch import Tensor, nn

from atoll import Plan, run
from atoll.core.parts import Part
from atoll.train.build import build_job
from atoll.train.dropout import CounterDropout


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 23, 1000])
def test_masks_are_those_of_whole_numbers(place: int) -> None:
    layer = CounterDropout(0.3, place, channels=False).train()
    layer.dropout_seed.fill_(2**61 - 77)
    expected = hashed_keep(2**61 - 77, place, 200, 0.3)
    assert (layer(torch.ones(200)) * 0.7).round().tolist() == expected
    assert 100 < sum(expected) < 180


class Block(nn.Module):
    """Attention and a small network, each with a dropout behind it, as in BERT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.dense = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.drops[0](self.attention(x, x, x, need_weights=False)[0]))
        return self.norms[1](x + self.drops[1](torch.nn.functional.gelu(self.dense(x))))


class Encoder(nn.Module):
    """The rows of an image as a sequence, and 24 dropouts."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, p: float | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(input_shape[2]) for _ in range(12)))
        self.out = nn.Linear(input_shape[2], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Dropout) and p is not None:
                module.p = p

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x.squeeze(1)).mean(1))


def encoder(input_shape: tuple[int, ...], num_classes: int, p: float | None = None) -> nn.Module:
    return Encoder(input_shape, num_classes, p)


def plan_of(model: Any, engine: Any) -> Plan:
    local = {"lr": 0.05, "steps": 2, "batch_size": 8}
    return Plan(partition={"num_clients": 4}, model=model, local=local, rounds=1, engine=engine)


def test_any_number_of_dropouts_trains_in_every_engine() -> None:
    assert len(build_job(plan_of(encoder, "inline")).dropout_seeds) == 24
    expected = run(plan_of(encoder, "inline"))
    stacked = run(plan_of(encoder, {"name": "vectorised", "stack": 4}))
    shared = run(plan_of(encoder, {"name": "processes", "stack": 4, "workers": 2}))
    assert stacked.engine["stack"] == shared.engine["stack"] == 4
    assert torch.equal(stacked.params_D, shared.params_D)
    assert (stacked.params_D - expected.params_D).abs().max() < 1e-5
    from_plain = run(plan_of(Part(encoder, p=0.0), "inline")).params_D
    assert (expected.params_D - from_plain).abs().max() > 1e-3
