"""The audit finds what is broken, and what is right passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.engine.audit import audit_plan
from atoll.privacy.auditing import audited, least_epsilon, most_shown, p_value

SETTINGS: dict[str, Any] = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5}


def plan_of(name: str, sampler: str = "poisson", **privacy: Any) -> Plan:
    return Plan(
        partition={"name": "iid", "num_clients": 200},
        policy={"size": 40},
        sampler=sampler,
        rounds=30,
        model={"name": "mlp_2nn", "hidden": 32},
        privacy={"name": name, **SETTINGS, **privacy},
    )


@pytest.mark.parametrize(
    ("name", "sampler", "privacy"),
    [
        ("central", "poisson", {}),
        pytest.param("central", "poisson", {"quantile": 0.5, "bit_sigma": 3.0}, marks=pytest.mark.slow),
        ("ftrl", "round_robin", {"sigma": 4.0}),
        pytest.param("distributed", "round_robin", {"sigma": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_what_is_right_passes(name: str, sampler: str, privacy: dict[str, Any]) -> None:
    found = audit_plan(plan_of(name, sampler, **privacy))
    assert found.passed
    assert found.found.epsilon < 0.8 * found.claimed


@pytest.mark.parametrize("name", ["no_noise", "no_clip", "weighted"])
def test_what_is_broken_is_found(name: str) -> None:
    found = audit_plan(plan_of(f"privacy.breaking:{name}"))
    assert not found.passed
    assert found.found.epsilon >= found.most_shown > found.claimed


def test_too_few_canaries_say_so() -> None:
    with pytest.raises(PlanError, match="ask for more with --canaries"):
        audit_plan(plan_of("central", sigma=0.3), num_canaries=50)


def test_samples_cannot_be_audited_by_clients() -> None:
    with pytest.raises(PlanError, match="looks for clients"):
        audit_plan(plan_of("sample", "uniform"))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_the_bound_holds_for_randomised_response_and_is_not_far(epsilon: float) -> None:
    """Coins that are told with probability e^eps / (1 + e^eps) give away epsilon exactly: the bound comes close."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(20):
        inside_M = rng.random(2000) < 0.5
        told_M = inside_M == (rng.random(2000) < 1 / (1 + np.exp(-epsilon)))
        found.append(audited(told_M + 1e-6 * rng.random(2000), inside_M, 0.0).epsilon)
    assert sum(bound > epsilon for bound in found) <= 2  # of 20 at 95 %
    assert np.median(found) > 0.6 * epsilon


def test_p_values() -> None:
    assert p_value(10, 10, 10, 0.0, 0.0) == pytest.approx(2**-10)
    assert p_value(100, 100, 80, 1.0, 1e-5) > p_value(100, 100, 80, 1.0, 0.0)
    assert least_epsilon(100, 100, 50, 0.0, 0.05) == 0
    assert least_epsilon(1000, 500, 500, 1e-5, 0.05) > least_epsilon(1000, 500, 480, 1e-5, 0.05)
    assert most_shown(1000, 400, 1e-5) > most_shown(1000, 40, 1e-5) > 0
