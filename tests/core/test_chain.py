"""Transforms one after another: the order, the memory of each, and vectors that are clipped together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.core.params import spec_of
from atoll.core.parts import Part
from atoll.core.transform import Chain, Encoding, Transform, chain


def built(name: str, **options: Any) -> Transform:
    transform: Transform = Part(name, **options).build("transforms")
    return transform


def encoding(seed: int = 0) -> Encoding:
    return Encoding(spec_of(nn.Linear(3, 2)), 0, np.random.default_rng(seed))


def through(steps: Chain, vector: torch.Tensor, seed: int = 0) -> torch.Tensor:
    payload, _ = steps.encode(vector, {}, encoding(seed))
    return steps.decode(payload)


def test_a_chain_composes_in_order_and_its_neutral_element_is_identity() -> None:
    vector = torch.randn(8) * 10
    clip = built("clip", norm=1.5)
    assert torch.equal(through(chain(clip), vector), through(chain(built("identity"), clip, built("identity")), vector))
    assert torch.equal(through(chain(), vector), vector)
    assert chain(clip, clip).linear
    assert chain().sensitivity(3.0) == 3.0


def test_memory_travels_as_a_value() -> None:
    """Error feedback in miniature: what was not sent is sent next time."""

    def encode(vector, memory, encoding):  # type: ignore[no-untyped-def]
        total = vector + memory["rest"]
        kept = torch.where(torch.arange(len(total)) == total.abs().argmax(), total, 0.0)
        return kept, {}, {"rest": total - kept}

    largest = Transform(encode, lambda carrier, side: carrier, init=lambda n: {"rest": torch.zeros(n)})
    steps, vector, memory, sent = chain(built("identity"), largest), torch.tensor([3.0, 2.0, 1.0]), {}, torch.zeros(3)
    for _ in range(60):
        payload, memory = steps.encode(vector, memory, encoding())
        sent += steps.decode(payload)
    assert list(memory) == ["1.rest"]
    assert ((sent / 60) - vector).abs().max() < 0.2


def test_clip_is_joint_over_extra_vectors() -> None:
    update = Update(torch.tensor([3.0, 0.0]), torch.tensor(1.0), {"c": torch.tensor([0.0, 4.0])})
    clipped = update.rebuilt(through(chain(built("clip", norm=1.5)), update.vector()))
    assert float(clipped.vector().norm()) == pytest.approx(1.5)
    torch.testing.assert_close(clipped.aux["c"], torch.tensor([0.0, 1.2]))
    with pytest.raises(PlanError, match=r"clip: norm must be above 0, got 0\.0; to send nothing at all"):
        Part("clip", norm=0.0).build("transforms")
