"""What the heterogeneity recipes must show. Slow: minutes of training."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from atoll.api import run
from atoll.core.plan import Plan

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name: str, **changes: object) -> Plan:
    plan = Plan.from_toml((RECIPES / name).read_text())
    return plan.replace({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.slow
def test_fedprox_keeps_stragglers_and_fedavg_loses_them() -> None:
    """Li et al. 2020 (arXiv:1812.06127), figure 1, 90 % stragglers: about .64 against .85 and more."""
    prox = run(recipe("fedprox_stragglers.toml")).history
    fedavg = run(recipe("fedprox_stragglers.toml", algorithm="fedavg", devices__drop=True)).history
    last = [statistics.fmean(row["test"]["accuracy"] for row in rows[-30:]) for rows in (prox, fedavg)]
    print(f"accuracy over the last 30 rounds: FedProx {last[0]:.3f}, FedAvg {last[1]:.3f}")
    assert prox[-1]["test"]["accuracy"] >= 0.85
    assert 0.5 < last[1] < 0.75


@pytest.mark.slow
def test_buffered_rounds_take_a_third_of_the_time() -> None:
    """Against synchronous rounds with as many clients at work, also where these ask 1.3 times what they need."""
    buffered = run(recipe("fedbuff.toml"))
    times = [buffered.history[-1]["simulated_seconds"]]
    for policy in ({"name": "cohort", "size": 100}, {"name": "cohort", "size": 77, "over_selection": 1.29}):
        plan = recipe("fedbuff.toml", policy=policy, evaluation__every=1)
        result = run(plan)
        assert result.reason == buffered.reason == "target reached"
        times.append(result.history[-1]["simulated_seconds"])
    print("simulated seconds to 93 %: buffered {:.0f}, synchronous {:.0f}, over-selecting {:.0f}".format(*times))
    assert times[0] <= min(times[1:]) / 3
