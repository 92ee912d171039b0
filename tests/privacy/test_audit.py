"""The audit finds noise that is too small, says how small it could have found, and accuses nobody falsely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.core.sampler import Sampler
from atoll.privacy.auditing import (
    Counts,
    detectable_share,
    mu_lower_bound,
    num_canaries_for,
    rate_upper_bound,
    reachable_mu,
)
from atoll.rounds.samplers.poisson import poisson
from atoll.simulation.audit import audit_plan

SETTINGS: dict[str, Any] = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5}
SAMPLERS = {"central": "poisson", "ftrl": "round_robin", "local": "uniform", "distributed": "round_robin"}
EVERY = [*SAMPLERS, "sample"]


def plan_of(name: str, sampler: Any = "poisson", **privacy: Any) -> Plan:
    return Plan(
        partition={"name": "iid", "num_clients": 200},
        policy={"size": 40},
        sampler=sampler,
        rounds=30,
        local={"steps": 2, "batch_size": 3},
        model={"name": "mlp_2nn", "hidden": 32},
        privacy={"name": name, **SETTINGS, **privacy},
    )


@pytest.mark.parametrize(
    ("name", "privacy"),
    [
        *((name, {}) for name in EVERY),
        ("central", {"sigma": 4.0}),
        pytest.param("central", {"quantile": 0.5, "bit_sigma": 3.0}, marks=pytest.mark.slow),
        *(pytest.param(name, {"sigma": 4.0}, marks=pytest.mark.slow) for name in EVERY[1:]),
    ],
)
def test_what_is_right_passes_and_the_bound_is_near(name: str, privacy: dict[str, Any]) -> None:
    found = audit_plan(plan_of(name, SAMPLERS.get(name, "uniform"), **privacy))
    assert found.passed
    assert found.epsilon < found.claimed
    assert 0.5 * found.claim.mu < found.mu <= found.claim.mu
    assert found.detects >= 0.5


@pytest.mark.parametrize("name", EVERY)
def test_half_the_noise_is_found_out_by_default(name: str) -> None:
    found = audit_plan(plan_of("privacy.breaking:less_noise", SAMPLERS.get(name, "uniform"), of=name, share=0.5))
    assert not found.passed
    assert found.mu > 1.5 * found.claim.mu
    assert found.epsilon > found.claimed


@pytest.mark.parametrize("name", ["no_noise", "no_clip", "weighted"])
def test_what_is_broken_is_found(name: str) -> None:
    found = audit_plan(plan_of(f"privacy.breaking:{name}"))
    assert not found.passed
    assert found.mu > 2.5 * found.claim.mu
    assert found.epsilon > found.claimed


def greedy(rate: float) -> Sampler:
    """Says that it draws clients with one rate, and draws them with another."""
    return poisson()._replace(rate=rate)


def test_clients_that_are_drawn_too_often_are_found_out() -> None:
    found = audit_plan(plan_of("central", {"name": "privacy.test_audit:greedy", "rate": 0.1}))
    assert found.claim.rate == 0.1
    assert not found.passed
    assert 0.15 < found.rate <= 0.25
    assert found.epsilon > found.claimed


def test_too_few_canaries_could_find_little_and_say_so() -> None:
    found = audit_plan(plan_of("central", sigma=4.0), num_canaries=50)
    assert found.passed
    assert found.detects < 0.5


def test_clips_that_protect_nobody_are_not_audited() -> None:
    with pytest.raises(PlanError, match="which proportional does not claim"):
        plan = plan_of("sample", "uniform")
        audit_plan(plan.replace({"privacy": {"name": "proportional", "noise": 0.5, "epsilon": 8.0, "delta": 1e-5}}))


@pytest.mark.parametrize("mu", [0.25, 1.0, 3.0])
def test_the_bound_holds_for_gaussians_and_is_as_strong_as_is_said(mu: float) -> None:
    """Of 400 audits at 95 % confidence at most a few go too far, and most reach what the power says."""
    rng = np.random.default_rng(1)
    num, tries = 8000, 400
    missed, mistaken = ((rng.normal(size=(tries, num)) > mu / 2).sum(1) for _ in range(2))
    pairs = zip(missed.tolist(), mistaken.tolist(), strict=True)
    bounds = np.array([mu_lower_bound(Counts(num, lost, num, wrong), 0.95) for lost, wrong in pairs])
    assert (bounds > mu).mean() <= 0.05 + 3 * np.sqrt(0.05 / tries)
    assert (bounds >= reachable_mu(mu, num, num, 0.95)).mean() >= 0.95 - 3 * np.sqrt(0.05 / tries)
    assert reachable_mu(mu, num, num, 0.95) > 0.5 * mu


def test_more_canaries_find_smaller_faults() -> None:
    shares = [detectable_share(0.5, num, num, 0.999) for num in (100, 1000, 10_000, 100_000)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[2] < shares[3] < 1
    for mu in (0.05, 0.3, 1.0, 2.0):
        num = num_canaries_for(mu, 0.5, 1.0, 0.999)
        assert detectable_share(mu, num, num, 0.999) >= 0.5
    assert detectable_share(20.0, 1000, 1000, 0.999) == 0  # nothing is missed with or without half of the noise
    assert rate_upper_bound(5, 5, 0.9) == 1
