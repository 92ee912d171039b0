"""Shapes: R repetitions, N clients, D coordinates, m the cohort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import PlanError
from atoll.rounds.planning import as_table, clients_needed, relative_noise

VARIANCES = st.floats(1e-6, 1e6)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("cohort", [1, 3, 9, 12])
def test_the_formula_is_what_drawing_gives(cohort: int, replacement: bool) -> None:
    """The squared error over 4,000 drawn cohorts has the stated mean, within 4 standard errors."""
    rng = np.random.default_rng(7)
    gradient_ND = rng.normal(size=(12, 5)) * rng.uniform(0.1, 3, size=(12, 1)) + 1.0
    mean_D = gradient_ND.mean(0)
    variance = float(((gradient_ND - mean_D) ** 2).sum(1).mean())
    norm = float(np.linalg.norm(mean_D))
    chosen = [rng.choice(12, size=cohort, replace=replacement) for _ in range(4000)]
    error_R = np.array([((gradient_ND[clients].mean(0) - mean_D) ** 2).sum() for clients in chosen])
    stated = (relative_noise(12, cohort, variance, norm, replacement) * norm) ** 2
    assert abs(error_R.mean() - stated) <= 4 * error_R.std() / math.sqrt(len(error_R)) + 1e-12
    if cohort == 12:
        assert (stated == 0) == (not replacement)


@settings(max_examples=200)
@given(st.integers(1, 10**6), VARIANCES, VARIANCES, st.booleans())
def test_the_cohort_is_enough_and_one_less_is_not(num: int, variance: float, wanted: float, replacement: bool) -> None:
    needed = clients_needed(num, variance, wanted, replacement)

    def reached(cohort: int) -> float:
        return relative_noise(num, cohort, variance, 1.0, replacement) ** 2

    assert reached(needed) <= wanted * (1 + 1e-9)
    assert needed == 1 or reached(needed - 1) > wanted * (1 - 1e-9)
    assert replacement or needed <= num


def test_silos_and_devices_get_different_answers() -> None:
    silos, devices = (clients_needed(num, variance=1.0, wanted_variance=0.1) for num in (10, 10_000))
    assert (silos, devices) == (6, 10)
    assert clients_needed(10, 1.0, 0.1, replacement=True) == clients_needed(10_000, 1.0, 0.1, replacement=True) == 10


def test_the_ends_of_the_scale() -> None:
    assert [clients_needed(num, 1.0, 0.0) for num in (49, 50, 98)] == [49, 50, 98]  # 1 / (1 / 49) is above 49
    assert clients_needed(1, 1.0, 0.1) == 1
    assert clients_needed(50, 0.0, 0.0) == 1
    assert relative_noise(1, 1, 1.0, 1.0) == 0.0


def test_the_table_says_what_the_functions_say() -> None:
    header, *rows, last = as_table(100, variance=4.0, norm=2.0, model_bytes=1000, wanted_noise=0.2).splitlines()
    assert header.split() == ["clients", "noise", "bytes", "a", "round"]
    cells = [row.split() for row in rows]
    assert [int(row[0]) for row in cells] == [1, 2, 5, 10, 20, 21, 50, 100]
    for cohort, noise, num_bytes in cells:
        assert noise == f"{relative_noise(100, int(cohort), 4.0, 2.0):.1%}"
        assert int(num_bytes.replace(",", "")) == 2000 * int(cohort)
    assert last == "A noise of 20.0% needs 21 of 100 clients a round."


def test_with_replacement_only_different_clients_cost_bytes() -> None:
    """Ten draws of two clients miss one of them with probability 2 / 2^10."""
    rows = as_table(2, variance=1.0, norm=1.0, model_bytes=1000, wanted_noise=math.sqrt(0.1), replacement=True)
    assert "10 31.6% 3,996" in " ".join(rows.split())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: clients_needed(0, 1.0, 1.0), "at least 1 client"),
        (lambda: clients_needed(5, -1.0, 1.0), "0 or more"),
        (lambda: clients_needed(5, math.nan, 1.0), "measure it again"),
        (lambda: clients_needed(5, 1.0, -1.0), "0 or more"),
        (lambda: clients_needed(5, 1.0, 0.0, replacement=True), "above 0 with replacement"),
        (lambda: relative_noise(5, 6, 1.0, 1.0), "at most 5 without replacement"),
        (lambda: relative_noise(5, 0, 1.0, 1.0, replacement=True), "at most 5 without replacement"),
        (lambda: relative_noise(5, 2, 1.0, 0.0), "above 0"),
    ],
)
def test_impossible_numbers_are_refused(call: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        call()  # type: ignore[operator]
