"""What the recipe of split learning must show. Slow: minutes of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import Plan, run

RECIPE = Path(__file__).parents[2] / "recipes" / "split_mnist.toml"


@pytest.mark.slow
def test_splitfed_loses_less_than_a_point_on_iid_mnist() -> None:
    """At equal epochs; the first version is FedAvg, to the bit."""
    plan = Plan.from_toml(RECIPE.read_text()).replace({"engine": "inline", "evaluation.every": 0})
    federated = run(plan.replace({"split": None}))
    accuracies = {way: run(plan.replace({"split.way": way})).accuracy for way in ("splitfed_v1", "splitfed_v2")}
    print(f"FedAvg {federated.accuracy:.4f}, {accuracies}")
    assert federated.accuracy > 0.96
    assert accuracies["splitfed_v1"] == federated.accuracy
    assert accuracies["splitfed_v2"] > federated.accuracy - 0.01
