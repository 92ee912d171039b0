"""The recipe under secure aggregation ends where it ends without."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import Plan, run

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist_secagg.toml"


@pytest.mark.slow
def test_masks_and_a_fifth_of_drop_outs_cost_no_accuracy() -> None:
    plan = Plan.from_toml(RECIPE.read_text())
    secret, plain = run(plan), run(plan.replace({"secagg": None}))
    assert abs(secret.accuracy - plain.accuracy) <= 0.001
    lost = sum(row["secagg"]["lost"] for row in secret.history) / (50 * plan.rounds)
    assert 0.15 < lost < 0.25 and secret.history[-1]["abandoned"] == 0
