"""The recipes of distillation do better than the same plans without it. Slow: minutes of training."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from atoll import Plan, run

RECIPES = Path(__file__).parents[2] / "recipes"


def accuracies(recipe: str, settings: dict[str, object]) -> list[float]:
    plan = Plan.from_toml((RECIPES / recipe).read_text()).replace(settings)
    return [row["test"]["accuracy"] for row in run(plan).history if "test" in row]


@pytest.mark.slow
def test_feddf_is_above_fedavg_from_the_same_clients() -> None:
    """Mean over all rounds, since single rounds swing by ten points under such a skew."""
    feddf, fedavg = accuracies("feddf.toml", {}), accuracies("feddf.toml", {"algorithm": "fedavg"})
    assert fmean(feddf) > fmean(fedavg) + 0.05


@pytest.mark.slow
def test_fedmd_is_above_clients_alone() -> None:
    together, alone = accuracies("fedmd.toml", {}), accuracies("fedmd.toml", {"algorithm.epochs": 0})
    assert together[-1] > alone[-1] + 0.05
