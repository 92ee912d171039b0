"""What every transform must satisfy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.core.params import spec_of
from atoll.core.parts import Part, members
from atoll.core.transform import Chain, Encoding, Transform, chain
from atoll.core.wire import pack, unpack

OPTIONS = {"clip": {"norm": 1.5}, "layers": {"patterns": "weight"}, "threshold": {"magnitude": 0.5}}
EVERY = members("transforms")


def built(name: str) -> Transform:
    transform: Transform = Part(name, **OPTIONS.get(name, {})).build("transforms")
    return transform


def encoding(seed: int = 0) -> Encoding:
    return Encoding(spec_of(nn.Linear(3, 2)), 0, np.random.default_rng(seed))


def through(steps: Chain, vector: torch.Tensor, seed: int = 0) -> torch.Tensor:
    payload, _ = steps.encode(vector, {}, encoding(seed))
    assert unpack(pack(payload), max_bytes=10_000).carrier.dtype == payload.carrier.dtype
    return steps.decode(payload)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3))
def test_the_declared_norm_holds(name: str, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    vector = torch.randn(8) * scale
    bound = chain(built(name)).sensitivity(float(vector.norm()))
    assert float(through(chain(built(name)), vector).norm()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_encoding_is_reproducible_and_keeps_the_shape(name: str) -> None:
    vector = torch.randn(8)
    first, second = through(chain(built(name)), vector, 3), through(chain(built(name)), vector, 3)
    assert torch.equal(first, second)
    assert first.shape == vector.shape


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("layers", "low_rank")])
def test_nothing_is_encoded_as_nothing(name: str) -> None:
    """A threshold before it may leave no value at all; layers and low rank ask for whole models."""
    assert through(chain(built(name)), torch.zeros(0)).shape == (0,)


def test_a_chain_composes_in_order_and_its_neutral_element_is_identity() -> None:
    vector = torch.randn(8) * 10
    clip = built("clip")
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
    clipped = update.rebuilt(through(chain(built("clip")), update.vector()))
    assert float(clipped.vector().norm()) == pytest.approx(1.5)
    torch.testing.assert_close(clipped.aux["c"], torch.tensor([0.0, 1.2]))
    with pytest.raises(PlanError, match=r"clip: norm must be above 0, got 0\.0; to send nothing at all"):
        Part("clip", norm=0.0).build("transforms")
