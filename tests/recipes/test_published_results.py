"""The recipes reach what their papers published, by the papers' own rule. Slow: minutes of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.api import run
from atoll.core.plan import Plan
from atoll.report.reading import read_run, rounds_to

RECIPES = Path(__file__).parents[2] / "recipes"


def rounds_needed(recipe: str, accuracy: float, out: Path) -> float:
    run(Plan.from_toml((RECIPES / recipe).read_text()), out=out)
    needed = rounds_to(read_run(out), accuracy)
    assert needed is not None, f"{recipe} never reached {accuracy}"
    print(f"{recipe}: {100 * accuracy:g} % after {needed:.1f} rounds")
    return needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "accuracy", "most"),
    [
        ("mnist_2nn_iid.toml", 0.97, 45),  # McMahan et al. 2017, table 1: 87
        ("mnist_2nn_shards.toml", 0.97, 330),  # table 1: 664
        ("mnist_cnn_iid.toml", 0.99, 20),  # table 2: 20
    ],
)
def test_rounds_to_accuracy(recipe: str, accuracy: float, most: float, tmp_path: Path) -> None:
    assert rounds_needed(recipe, accuracy, tmp_path / "run") <= most


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_every_recipe_is_a_valid_plan(recipe: str) -> None:
    plan = Plan.from_toml((RECIPES / recipe).read_text())
    assert Plan.from_toml(plan.to_toml()) == plan
