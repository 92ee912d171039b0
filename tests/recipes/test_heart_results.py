"""Heart disease of four hospitals: FLamby's published accuracy, and a recipe that is better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll import Plan, run
from atoll.core.errors import DataError
from atoll.data.catalog.heart import heart

RECIPES = Path(__file__).parents[2] / "recipes"
SEEDS = range(42, 47)


def mean_accuracy(recipe: str) -> float:
    try:
        heart(quiet=True)
    except DataError as error:
        pytest.skip(f"the heart data cannot be had here: {error}")
    plan = Plan.from_toml((RECIPES / recipe).read_text())
    found = [run(plan.replace({"seed": seed})).accuracy for seed in SEEDS]
    print(f"{recipe}: {np.round(found, 4).tolist()}, mean {np.mean(found):.4f}")
    return float(np.mean(found))


@pytest.mark.slow
def test_fedavg_is_as_published() -> None:
    assert mean_accuracy("heart_flamby.toml") == pytest.approx(0.748, abs=0.005)


@pytest.mark.slow
def test_a_common_scale_beats_the_best_published_figure() -> None:
    assert mean_accuracy("heart_common_scale.toml") > 0.785
