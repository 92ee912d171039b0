"""Test that no norm grows on the grid, for any update."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.messages import Update
from atoll.core.params import ParamSpec, Slot
from atoll.privacy.grid import LEVELS, bounded, integer_sum, lengths, noisy_share

SPEC = ParamSpec((Slot("a", (3,), 0, 3), Slot("b", (4,), 3, 4)), 7, torch.float32)


def update_of(rows_CD: torch.Tensor, aux_CA: torch.Tensor | None = None) -> Update:
    return Update(rows_CD, torch.arange(1.0, len(rows_CD) + 1), {} if aux_CA is None else {"extra": aux_CA})


def exact_squares(clipped: Update) -> list[int]:
    """The squared length of each row, in whole numbers of any size."""
    rows = torch.cat([clipped.delta_D, *(value.flatten(1) for value in clipped.aux.values())], dim=1)
    return [sum(int(value) ** 2 for value in row) for row in rows.tolist()]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-40, 40),
    clip=st.sampled_from([1e-6, 0.3, 1.0, 7.7, 1e6]),
    levels=st.sampled_from([16, 1 << 16, LEVELS]),
    kind=st.sampled_from(["normal", "equal", "one"]),
    double=st.booleans(),
)
def test_no_update_is_longer_than_the_clip(
    seed: int, exponent: int, clip: float, levels: int, kind: str, double: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows_CD = torch.randn(4, 7, generator=rng, dtype=torch.float64)
    if kind == "equal":
        rows_CD = torch.full((4, 7), float(rows_CD[0, 0]), dtype=torch.float64)
    if kind == "one":
        rows_CD[:, 1:] = 0
    rows_CD = (rows_CD * clip * 2.0**exponent).to(torch.float64 if double else torch.float32)
    for spec in (None, SPEC):
        clipped = bounded(update_of(rows_CD, rows_CD[:, :2].clone()), clip, levels, spec)
        assert max(exact_squares(clipped)) <= levels**2
        assert all(value == int(value) for value in clipped.delta_D.flatten().tolist())
        assert clipped.weight.tolist() == [1.0] * 4


def test_a_short_update_is_kept_and_a_long_one_points_the_same_way() -> None:
    rows_CD = torch.tensor([[0.3, 0.0, -0.4, 0, 0, 0, 0], [3.0, 0.0, -4.0, 0, 0, 0, 0]])
    clipped = bounded(update_of(rows_CD), 1.0, LEVELS).delta_D / LEVELS
    assert torch.allclose(clipped[0], rows_CD[0], atol=1e-6)
    assert torch.allclose(clipped[1], rows_CD[1] / 5, atol=1e-6)


def test_layers_are_clipped_separately() -> None:
    rows_CD = torch.tensor([[9.0, 0, 0, 0.1, 0, 0, 0]])
    clipped = bounded(update_of(rows_CD), 1.0, LEVELS, SPEC).delta_D / LEVELS
    assert float(clipped[0, 0]) == pytest.approx(1 / math.sqrt(2), abs=1e-5)
    assert float(clipped[0, 3]) == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("spec", [None, SPEC])
def test_updates_that_are_not_finite_become_zeros(bad: float, spec: ParamSpec | None) -> None:
    rows_CD = torch.full((3, 7), 0.1)
    rows_CD[1, 4] = bad
    clipped = bounded(update_of(rows_CD), 1.0, LEVELS, spec).delta_D
    assert clipped[1].abs().max() == 0
    assert clipped[0].abs().min() > 0
    assert torch.equal(clipped[0], clipped[2])


def test_a_zero_update_stays_zero() -> None:
    assert bounded(update_of(torch.zeros(2, 7)), 1.0, LEVELS).delta_D.abs().max() == 0
    assert lengths(update_of(torch.zeros(2, 7))).tolist() == [0, 0]


def test_sums_do_not_depend_on_order_or_groups() -> None:
    rows_CD = torch.randn(20, 7) * torch.logspace(-3, 3, 20)[:, None]
    fold = integer_sum()
    whole = fold.add({}, bounded(update_of(rows_CD), 1.0, LEVELS))
    order = torch.randperm(20)
    parts = [fold.add({}, bounded(update_of(rows_CD[some]), 1.0, LEVELS)) for some in order.split(6)]
    merged = parts[0]
    for part in parts[1:]:
        merged = fold.merge(merged, part)
    assert whole["delta"].dtype == torch.int64
    assert torch.equal(whole["delta"], merged["delta"])


def test_a_share_is_the_update_on_the_grid_and_its_noise() -> None:
    vector_V = torch.full((50_000,), 0.001)
    share_V = noisy_share(vector_V, 1.0, 1 << 16, 20.0, bytes(32))
    assert share_V.dtype == np.int64
    assert abs(float(share_V.mean()) - int(0.001 * (1 << 16))) < 5 * 20 / math.sqrt(50_000)
    assert float(share_V.std()) == pytest.approx(20, rel=0.02)
    broken = noisy_share(torch.full((50_000,), math.nan), 1.0, 1 << 16, 20.0, bytes(32))
    assert np.array_equal(broken + int(0.001 * (1 << 16)), share_V)  # nothing but the noise
