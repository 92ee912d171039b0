"""Defences that are broken below the plan are called broken; those that are whole are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll import Plan
from atoll.core.messages import Update
from atoll.core.params import ParamSpec
from atoll.privacy import grid
from atoll.privacy.mechanisms import central, ftrl
from atoll.redteam.claims import check_claims, mask_claim
from atoll.redteam.run import red_team
from atoll.report.redteam import BROKEN, HOLDS, UNCHECKED, Claim, Finding
from atoll.secagg import client, keys
from atoll.secagg.schemes import additive, pairwise
from atoll.simulation.seat import watch
from atoll.train import private
from atoll.transforms import clip as clip_module

PLAN = Plan(
    model={"name": "mlp_2nn", "hidden": 32},
    partition={"num_clients": 40, "samples_per_client": 20},
    policy={"size": 10},
    local={"steps": 2, "batch_size": 5, "lr": 0.1},
    evaluation={"every": 0},
    engine="inline",
)
FULL_LENGTH = r"move it by (999|1000)\.\d clips"
PRIVACY = {"clip": 0.5, "sigma": 1.0, "delta": 1e-5}
SAMPLERS = {
    "central": "poisson",
    "ftrl": "round_robin",
    "local": "uniform",
    "sample": "uniform",
    "distributed": "round_robin",
}


def private_plan(name: str) -> Plan:
    return PLAN.replace({"privacy": {"name": name, **PRIVACY}, "sampler": SAMPLERS[name]})


def verdicts(plan: Plan, findings: Iterable[Finding] = ()) -> dict[str, Claim]:
    claims = check_claims(plan, watch(plan, 1), list(findings), lambda: False)
    return {claim.defence: claim for claim in claims}


@pytest.fixture
def a_tenth_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every mechanism draw noise of a tenth of the size that it asks for."""

    def weak(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return lambda key, sigma, num: draw(key, sigma / 10, num)

    for module, name in (
        (central, "discrete_gaussian"),
        (ftrl, "discrete_gaussian"),
        (grid, "discrete_gaussian"),
        (private, "narrow_gaussian"),
    ):
        monkeypatch.setattr(module, name, weak(getattr(module, name)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_whole_mechanisms_hold(name: str) -> None:
    found = verdicts(private_plan(name))
    assert {claim.verdict for claim in found.values()} == {HOLDS}, found
    assert {f"{name} noise", f"{name} clip"} <= set(found)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.usefixtures("a_tenth_of_the_noise")
def test_noise_at_a_tenth_is_called_broken(name: str) -> None:
    found = verdicts(private_plan(name))
    assert found[f"{name} noise"].verdict == BROKEN and "10% of what is claimed" in found[f"{name} noise"].seen
    assert found[f"{name} clip"].verdict == HOLDS


def unclipped(update: Update, clip: float, levels: int, spec: ParamSpec | None = None) -> Update:
    """Put updates onto the grid as long as they are."""
    return Update((update.delta_D.double() / clip * levels).to(torch.int64), torch.ones_like(update.weight), {})


@pytest.mark.parametrize("name", ["central", "local", "ftrl", "distributed"])
def test_a_clip_that_is_off_is_called_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grid, central, ftrl):
        monkeypatch.setattr(module, "bounded", unclipped)
    found = verdicts(private_plan(name))
    assert found[f"{name} clip"].verdict == BROKEN and re.search(FULL_LENGTH, found[f"{name} clip"].seen)
    assert found[f"{name} noise"].verdict == HOLDS


def test_a_clip_of_the_uplink_is_compared_with_what_clients_send(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLAN.replace({"uplink": [{"name": "clip", "norm": 0.05}, {"name": "qsgd", "levels": 16}]})
    whole = verdicts(plan)["clip"]
    assert whole.verdict == HOLDS and "the longest has norm 0.05," in whole.seen
    assert "lower it" in verdicts(plan.replace({"uplink": [{"name": "clip", "norm": 1e6}]}))["clip"].seen
    original = clip_module.clip
    monkeypatch.setattr(clip_module, "clip", lambda norm: original(norm)._replace(encode=lambda v, m, e: (v, {}, m)))
    assert verdicts(plan)["clip"].verdict == BROKEN


def test_noise_from_the_seed_is_called_broken() -> None:
    found = verdicts(private_plan("local").replace({"privacy.test_noise": True}))
    assert found["local noise"].verdict == BROKEN and "test_noise" in found["local noise"].seen


def test_an_empirical_epsilon_above_the_claim_is_called_broken() -> None:
    def finding(epsilon: float) -> Finding:
        return Finding("lira", "membership", "", {"AUC": 0.9, "empirical epsilon": epsilon}, 0.0, "")

    plan = private_plan("local")
    assert verdicts(plan, [finding(0.1)])["empirical epsilon"].verdict == HOLDS
    assert verdicts(plan, [finding(0.1), finding(50.0)])["empirical epsilon"].verdict == BROKEN


SECURE = PLAN.replace({"secagg": {}})
SHARED = PLAN.replace({"secagg": {"scheme": "additive"}})


@pytest.mark.parametrize("plan", [SECURE, SHARED], ids=["pairwise", "additive"])
def test_fresh_masks_hold(plan: Plan) -> None:
    found = verdicts(plan)
    assert {claim.verdict for claim in found.values()} == {HOLDS} and "30 masked vectors" in found["masks"].seen


def test_keys_of_a_round_before_are_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose keys are the same in every session, which no session salts: masks of two sums are the same."""

    def same_every_time(number: int) -> Callable[[int], bytes]:
        counter = iter(range(10**9))
        return lambda num: HKDF(SHA256(), num, b"", f"{number} {next(counter)}".encode()).derive(b"kept")

    def client_with_kept_keys(**settings: Any) -> client.Client:
        return client.Client(**settings, random=same_every_time(settings["client"]))

    agree, own_seed = keys.agree, keys.own_mask_seed
    monkeypatch.setattr(pairwise, "Client", client_with_kept_keys)
    monkeypatch.setattr(keys, "own_mask_seed", lambda secret, session: own_seed(secret, b""))
    monkeypatch.setattr(keys, "agree", lambda own, a, b, session, purpose: agree(own, a, b, b"", purpose))
    found = verdicts(SECURE)["masks"]
    assert found.verdict == BROKEN and "used the same masks" in found.seen


def test_one_seed_for_all_clients_is_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive.os, "urandom", bytes)
    assert verdicts(SHARED)["masks"].verdict == BROKEN


def test_masks_that_are_left_out_are_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive, "apply", lambda vector, masks: None)  # for clients and servers alike: sums are right
    found = verdicts(SHARED)["masks"]
    assert found.verdict == BROKEN and "unmasked" in found.seen


def test_a_scheme_without_masks_is_not_checked() -> None:
    assert mask_claim([{}]).verdict == UNCHECKED


def test_without_time_nothing_is_claimed() -> None:
    plan = private_plan("local")
    assert {each.verdict for each in check_claims(plan, watch(plan, 1), [], lambda: True)} == {UNCHECKED}


@pytest.mark.usefixtures("a_tenth_of_the_noise")
def test_the_red_team_says_what_is_broken() -> None:
    found = red_team(private_plan("local"), probes=["loss_threshold"], rounds=1)
    assert {claim.defence: claim.verdict for claim in found.claims}["local noise"] == BROKEN
    assert [change.off for change in found.changes] == [True, False]  # the noise, and secure aggregation


def test_private_steps_without_a_clip_are_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_units_of_the_clip(square_B: torch.Tensor, real_B: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        return real_B / clip.unsqueeze(-1)

    monkeypatch.setattr(private, "weights_of", in_units_of_the_clip)
    found = verdicts(private_plan("sample"))["sample clip"]
    assert found.verdict == BROKEN and re.search(FULL_LENGTH, found.seen)
