"""The noise is exact: its frequencies are those of the definition, also where few bits do not decide."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from atoll.core.errors import PlanError
from atoll.privacy import noise
from atoll.privacy.noise import Bits, Streams, Uniform, coins, derived, discrete_gaussian, fresh_secret

KEY = bytes(range(32))


def exact(sigma: float, reach: int) -> np.ndarray:
    """P(x) for x in -reach..reach, summed in float64."""
    x = np.arange(-reach, reach + 1, dtype=np.float64)
    weights: np.ndarray = np.exp(-(x**2) / (2 * sigma**2))
    return weights / math.fsum(weights)


def p_value(counts: np.ndarray, shares: np.ndarray) -> float:
    """Of a chi-square test; cells in which less than ten are expected are pooled."""
    expected = shares * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 1:
        assert observed[-1] <= 10
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def binned(values: np.ndarray, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts and exact shares of 60 ranges of a wide Gaussian, cut where no bin of the sampler ends."""
    cuts = np.unique(np.floor(sigma * np.linspace(-3.1, 3.1, 59) * 1.0137).astype(np.int64))
    counts = np.bincount(np.searchsorted(cuts, values, side="left"), minlength=len(cuts) + 1)  # x <= cut
    if sigma < 1e6:
        x, shares = np.arange(-int(12 * sigma), int(12 * sigma) + 1), exact(sigma, int(12 * sigma))
        places = np.searchsorted(cuts, x, side="left")
        return counts, np.bincount(places, shares, minlength=len(cuts) + 1)
    below = stats.norm.cdf((cuts + 0.5) / sigma)
    return counts, np.diff(below, prepend=0, append=1)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 3.7, 17.0])
def test_small_deviations_follow_the_definition(sigma: float) -> None:
    values = discrete_gaussian(derived(KEY, "small"), sigma, 400_000)
    reach = int(np.abs(values).max())
    counts = np.bincount(values + reach, minlength=2 * reach + 1)
    shares = exact(sigma, reach + 40)[40:-40]
    assert p_value(counts, shares) > 1e-3
    wider = exact(sigma * 1.02, reach + 40)[40:-40]
    assert p_value(counts, wider) < 1e-3, "the test would not notice two per cent"


@pytest.mark.parametrize("sigma", [33.0, 1000.0, 12345.678, 2.7e6, 2.0**24 - 1, 2.0**24, 2.0**30, 2.0**40 * 1.37])
def test_large_deviations_follow_the_definition(sigma: float) -> None:
    values = discrete_gaussian(derived(KEY, "large"), sigma, 1_000_000)
    counts, shares = binned(values, sigma)
    assert p_value(counts, shares) > 1e-3
    assert p_value(*binned(values, sigma * 1.01)) < 1e-3
    assert values.var() == pytest.approx(sigma**2, rel=5 * math.sqrt(2 / 1e6))
    assert abs(values.mean()) < 5 * sigma / 1000
    assert stats.binomtest(int((values > 0).sum()), int((values != 0).sum())).pvalue > 1e-3
    assert p_value(np.bincount(values & 7, minlength=8), np.full(8, 1 / 8)) > 1e-3, (
        "low bits are as random as high ones"
    )


def test_the_tail_is_there() -> None:
    """Noise beyond four deviations is as frequent as it should be."""
    values = discrete_gaussian(derived(KEY, "tail"), 1000.0, 3_000_000)
    share = 2 * float(exact(1000.0, 12_000)[: 12_000 - 4000].sum())
    assert stats.binomtest(int((np.abs(values) > 4000).sum()), len(values), share).pvalue > 1e-3


def test_equal_keys_give_equal_values_and_others_independent_ones() -> None:
    first, again = (discrete_gaussian(KEY, 50.0, 100_000) for _ in range(2))
    assert np.array_equal(first, again)
    other = discrete_gaussian(derived(KEY, 1), 50.0, 100_000)
    assert abs(np.corrcoef(first, other)[0, 1]) < 5 / math.sqrt(100_000)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("sigma", [0.3, 40.0, 2.0**20])
def test_the_error_band_of_floats_does_not_show(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a band so wide that thousands of values are decided by exact arithmetic, every value stays the same."""
    usual = discrete_gaussian(KEY, sigma, 8000)
    calls: list[bool] = []
    below = Uniform.below

    def counting(self: Uniform, bounds: object) -> bool:
        calls.append(below(self, bounds))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(Uniform, "below", counting)
    monkeypatch.setattr(noise, "BAND", 0.5)
    assert np.array_equal(discrete_gaussian(KEY, sigma, 8000), usual)
    assert len(calls) > 50


def test_a_uniform_number_is_drawn_as_far_as_it_is_needed() -> None:
    """From no bits at all: coins of probability exp(-t), and the bins of a table, by exact arithmetic alone."""
    more = Bits(KEY, 9)
    t = Fraction(1, 3)
    heads = sum(Uniform(0, 0, more).below(lambda digits: noise._exp_bounds(t, digits)) for _ in range(4000))
    assert stats.binomtest(heads, 4000, math.exp(-1 / 3)).pvalue > 1e-3
    table = noise._table(2.0)
    counts = np.bincount([noise._bin_of(table, Uniform(0, 0, more), 0) for _ in range(3000)], minlength=20)
    weights = np.exp(-(np.arange(len(counts)) ** 2) / 8.0)
    assert p_value(counts, weights / weights.sum()) > 1e-3


class Fixed(Bits):
    """Bits of which the first words are given."""

    def __init__(self, first: list[int], key: bytes) -> None:
        super().__init__(key, 0)
        self.first = first

    def uint64(self, num: int) -> np.ndarray:
        words = super().uint64(num)
        while self.first and num:
            words[-num] = self.first.pop(0)
            num -= 1
        return words


def test_a_tie_with_the_end_of_a_bin_is_broken_by_more_bits() -> None:
    """64 bits that equal the end's first 64: what is left of the end after them is the chance to lie before it."""
    table = noise._table(2.0)
    end = int(table.ends[1])
    low, high = noise._share(table, 1, 60)
    left = float(low * (1 << 64) - end)
    assert 0.05 < left < 0.95
    assert float((high - low) * (1 << 64)) < 1e-30
    left_bits = 64 - noise.CELL_BITS
    cell = np.array([end >> left_bits], dtype=np.uint64)
    rest = (end & (1 << left_bits) - 1) << noise.CELL_BITS
    found = [int(noise._bins(table, cell, Fixed([rest], derived(KEY, i)))[0]) for i in range(2000)]
    assert set(found) == {1, 2}
    assert stats.binomtest(found.count(1), 2000, left).pvalue > 1e-3


def test_values_whose_cell_says_nothing_are_as_frequent() -> None:
    """All bins by the way that only few values take."""
    table = noise._table(5.0)
    blind = table._replace(bins=np.full_like(table.bins, -1), sure=np.zeros_like(table.sure))
    values = noise._draw(blind, Streams(Bits(KEY, 0), Bits(KEY, 1), Bits(KEY, 2)), 200_000)
    counts = np.bincount(values + 50, minlength=101)
    assert p_value(counts, exact(5.0, 50)) > 1e-3


def test_bins_end_where_they_should() -> None:
    table = noise._table(1000.0)
    weights = [math.exp(-((b << table.log_width) ** 2) / 2e6) for b in range(len(table.ends))]
    shares = np.cumsum(weights) / math.fsum(weights)
    assert table.ends.astype(np.float64) / 2.0**64 == pytest.approx(shares, rel=1e-12)


@pytest.mark.parametrize("rate", [Fraction(240, 60_000), Fraction(1, 3), Fraction(7, 8), Fraction(0), Fraction(1)])
def test_coins_have_their_rate(rate: Fraction) -> None:
    tossed = coins(derived(KEY, "coins"), rate, 200_000)
    assert stats.binomtest(int(tossed.sum()), len(tossed), float(rate)).pvalue > 1e-3
    assert np.array_equal(tossed, coins(derived(KEY, "coins"), rate, 200_000))


def test_coins_that_32_bits_do_not_decide_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Fraction(240, 60_000)
    bound = int(rate * (1 << 32))
    monkeypatch.setattr(Bits, "uint32", lambda self, num: np.full(num, bound, dtype=np.uint32))
    tossed = coins(KEY, rate, 3000)
    assert stats.binomtest(int(tossed.sum()), 3000, float(rate * (1 << 32) - bound)).pvalue > 1e-3


def test_contexts_are_told_apart() -> None:
    secret = fresh_secret()
    assert secret != fresh_secret()
    assert len(secret) == len(derived(secret)) == 32
    contexts: list[tuple[int | str, ...]] = [(1, 23), (12, 3), ("1", 23), ("123",), (123,), ("a", "b"), ("ab",), (-1,)]
    assert len({derived(secret, *context) for context in contexts}) == len(contexts)
    assert derived(secret, "a", 1) == derived(secret, "a", 1)
    assert derived(secret, "a", 1) != derived(fresh_secret(), "a", 1)


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e-3, 2.0**50, math.nan, math.inf])
def test_deviations_out_of_range_are_refused(sigma: float) -> None:
    with pytest.raises(PlanError, match="change sigma or the grid"):
        discrete_gaussian(KEY, sigma, 1)


def test_no_values_are_no_values() -> None:
    assert len(discrete_gaussian(KEY, 1.0, 0)) == len(coins(KEY, Fraction(1, 2), 0)) == 0


def test_noise_never_comes_from_numpy_or_torch() -> None:
    text = Path(noise.__file__).read_text()
    assert "np.random" not in text
    assert "torch" not in text
