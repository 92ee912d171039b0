"""The example of federated Cox regression equals the fit of all patients together."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from atoll import Dataset

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "survival" / "federated_cox.py"))
LIFELINES = [0.011948, -0.384919, 0.645920, 0.315018, -0.209603, -0.150342]
"""CoxPHFitter of lifelines 0.30.3, precision 1e-10, on the training patients of `lung`."""


def patients() -> Dataset:
    """Patients of four institutions with many deaths on one day."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 3)).astype(np.float32)
    day = np.ceil(rng.exponential(8 * np.exp(-(x @ np.array([0.8, -0.4, 0.0])))).clip(max=60))
    y = np.stack([day, rng.random(160) < 0.7], 1).astype(np.float32)
    owners = rng.integers(0, 4, size=150)
    return Dataset(
        name="patients",
        train_x=x[:150],
        train_y=y[:150],
        test_x=x[150:],
        test_y=y[150:],
        problem="survival",
        owners=owners,
    )


def efron(beta: np.ndarray, x: Any, day: Any, dead: Any) -> float:
    """Return the negative log partial likelihood of all patients, written out."""
    risk, total = np.exp(x @ beta), 0.0
    for moment in np.unique(day[dead]):
        here = (day == moment) & dead
        deaths = int(here.sum())
        total += float((x[here] @ beta).sum())
        for tie in range(deaths):
            total -= np.log(risk[day >= moment].sum() - tie / deaths * risk[here].sum())
    return -total


@pytest.mark.parametrize("settings", [{}, {"secagg": {"clip": 1000.0, "modulus_bits": 64}}], ids=str)
def test_institutions_find_the_pooled_fit(settings: dict[str, Any]) -> None:
    data = patients()
    x, day, dead = data.train_x.astype(float), data.train_y[:, 0], data.train_y[:, 1] == 1
    pooled = minimize(efron, np.zeros(3), args=(x, day, dead), tol=1e-12).x
    found = EXAMPLE["fit"](data=patients, **settings)
    assert np.abs(found - pooled).max() < 1e-4


def test_lung_is_what_lifelines_fits() -> None:
    from atoll.core.errors import DataError
    from atoll.data.catalog.lung import lung

    try:
        lung(quiet=True)
    except DataError as error:
        pytest.skip(f"the lung data cannot be had here: {error}")
    assert EXAMPLE["fit"]() == pytest.approx(LIFELINES, abs=1e-4)
