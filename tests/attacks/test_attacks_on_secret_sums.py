"""Attackers among clients whose updates are whole numbers, noised and added in secret."""

from __future__ import annotations

from typing import Any

import pytest

from atoll import Plan, run
from atoll.core.parts import examples, members

ATTACKS = [{"name": name, **options} for name in members("attacks") for options in examples("attacks", name) or [{}]]
ATTACKS.append({"name": "ipm", "factor": "optimised"})
SECRET = Plan(
    rounds=1,
    partition={"name": "iid", "num_clients": 10},
    model={"name": "mlp_2nn", "hidden": 4},
    policy={"size": 10},
    local={"steps": 1},
    secagg={},
    privacy={"name": "distributed", "clip": 1.0, "sigma": 1.0, "delta": 1e-3, "test_noise": True},
    attackers={"fraction": 0.2},
    evaluation={"every": 0},
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: "-".join(map(str, attack.values())))
def test_every_attack_meets_secret_sums(attack: dict[str, Any]) -> None:
    result = run(SECRET.replace({"attack": attack, "engine": "inline"}))
    assert result.reason == "all rounds done"
    assert result.params_D.isfinite().all()


def test_workers_tell_of_updates_that_are_not_finite() -> None:
    plan = SECRET.replace({"attack": "not_finite"})
    alone, parallel = (run(plan.replace({"engine": engine})) for engine in ("inline", {"name": "processes"}))
    assert alone.params_D.equal(parallel.params_D)
