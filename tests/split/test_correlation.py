"""Distance correlation against its definition, written as loops, and against what it must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from atoll.core.errors import DataError
from atoll.split.correlation import correlation, dependence

RNG = np.random.default_rng(0)


def naive(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return dCor and the bias-corrected square, entry by entry from the definitions."""
    n = len(x)

    def matrix(rows: np.ndarray) -> list[list[float]]:
        return [[math.dist(a, b) for b in rows] for a in rows]

    def covariances(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
        row_a, row_b = [sum(each) for each in a], [sum(each) for each in b]
        all_a, all_b = sum(row_a), sum(row_b)
        plain = unbiased = 0.0
        for i in range(n):
            for j in range(n):
                centred_a = a[i][j] - row_a[i] / n - row_a[j] / n + all_a / n**2
                centred_b = b[i][j] - row_b[i] / n - row_b[j] / n + all_b / n**2
                plain += centred_a * centred_b / n**2
                if i != j:
                    u_a = a[i][j] - (row_a[i] + row_a[j]) / (n - 2) + all_a / ((n - 1) * (n - 2))
                    u_b = b[i][j] - (row_b[i] + row_b[j]) / (n - 2) + all_b / ((n - 1) * (n - 2))
                    unbiased += u_a * u_b / (n * (n - 3))
        return plain, unbiased

    a, b = matrix(x), matrix(y)
    (xy, u_xy), (xx, u_xx), (yy, u_yy) = covariances(a, b), covariances(a, a), covariances(b, b)
    return math.sqrt(xy / math.sqrt(xx * yy)), u_xy / math.sqrt(u_xx * u_yy)


@pytest.mark.parametrize("num", [4, 5, 17])
def test_it_is_that_of_the_definition(num: int) -> None:
    x, y = RNG.normal(size=(num, 3)), RNG.normal(size=(num, 5))
    y[:, 0] += x[:, 0] ** 2
    found = dependence(torch.from_numpy(x), torch.from_numpy(y))
    plain, unbiased = naive(x, y)
    assert found.dcor == pytest.approx(plain, abs=1e-12) and found.squared == pytest.approx(unbiased, abs=1e-12)
    assert float(correlation(torch.from_numpy(x), torch.from_numpy(y))) == pytest.approx(plain, abs=1e-12)


def test_independent_rows_have_none_after_correction() -> None:
    """Of 30 rows of 50 columns dCor itself is far above 0: it says little of few rows."""
    pairs = [[torch.from_numpy(RNG.normal(size=(30, 50))) for _ in "xy"] for _ in range(40)]
    found = [dependence(*pair) for pair in pairs]
    assert abs(np.mean([each.squared for each in found])) < 0.05 and min(each.squared for each in found) < 0
    assert min(each.dcor for each in found) > 0.5


def test_it_sees_what_correlation_does_not() -> None:
    x = torch.linspace(-1, 1, 200, dtype=torch.float64).unsqueeze(1)
    assert abs(float(torch.corrcoef(torch.cat([x, x**2], dim=1).T)[0, 1])) < 1e-12
    assert dependence(x, x**2).squared > 0.2
    assert dependence(x, torch.ones_like(x)).dcor == 0.0


def test_its_gradient_is_that_of_differences() -> None:
    x, y = torch.from_numpy(RNG.normal(size=(6, 2))), torch.from_numpy(RNG.normal(size=(6, 3))).requires_grad_()
    assert torch.autograd.gradcheck(lambda each: correlation(x, each), (y,))


def test_equal_rows_have_finite_gradients() -> None:
    for rows in (torch.zeros(5, 3), torch.tensor([[0.0], [0.0], [1.0], [1.0], [2.0]])):
        leaf = rows.clone().requires_grad_()
        [grad] = torch.autograd.grad(correlation(torch.randn(5, 2), leaf), leaf)
        assert bool(grad.isfinite().all())


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(DataError, match="at least 4, got 3 and 3"):
        dependence(torch.zeros(3, 1), torch.zeros(3, 1))
