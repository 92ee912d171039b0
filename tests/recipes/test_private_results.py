"""Private recipes reach what they promise. Slow: minutes of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.api import run
from atoll.core.plan import Plan

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "accuracy"),
    [
        ("dp_sample_mnist_15.toml", 0.946),  # Opacus' example: 94.63 %
        ("dp_sample_mnist_60.toml", 0.968),  # Opacus' example: 96.78 %
    ],
)
def test_private_samples_reach_the_accuracy_of_opacus(recipe: str, accuracy: float) -> None:
    assert run(Plan.from_toml((RECIPES / recipe).read_text())).accuracy >= accuracy


@pytest.mark.slow
def test_private_clients_of_mnist_reach_92_percent_at_epsilon_8() -> None:
    result = run(Plan.from_toml((RECIPES / "dp_clients_mnist.toml").read_text()))
    assert result.history[-1]["privacy"]["epsilon"] <= 8.0
    assert result.accuracy >= 0.92
