"""The whole red team on plans of all kinds: each ends with a page, or with a refusal that says what to do."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from probes.test_token_leaks import texts, transformer
from problem_data import diabetes
from report.test_personal_page import Strict

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.redteam.poisoning import poison
from atoll.redteam.run import red_team
from atoll.report.redteam import FAILED, HOLDS, NO_TIME, RedTeam, as_text
from atoll.report.redteam_page import redteam_page

BASE: dict[str, Any] = {
    "model": {"name": "mlp_2nn", "hidden": 16},
    "partition": {"num_clients": 12, "samples_per_client": 10},
    "policy": {"size": 4},
    "local": {"steps": 1, "batch_size": "all", "lr": 0.1},
    "rounds": 3,
    "engine": "inline",
}
DP = {"clip": 0.5, "sigma": 1.0, "delta": 1e-5}
PLANS: dict[str, dict[str, Any]] = {
    "secagg": {"secagg": {}},
    "groups": {"secagg": {"groups": 2, "scheme": "additive", "min_survivors": 2}},
    "codecs": {"uplink": [{"name": "top_k", "fraction": 0.1}, "half"]},
    "clipped and quantised": {"uplink": [{"name": "clip", "norm": 0.1}, {"name": "qsgd", "levels": 16}]},
    "central": {"privacy": {"name": "central", **DP}, "sampler": "poisson"},
    "local": {"privacy": {"name": "local", **DP}},
    "sample": {"privacy": {"name": "sample", **DP}},
    "ftrl": {"privacy": {"name": "ftrl", **DP}, "sampler": "round_robin"},
    "rule": {"aggregator": {"name": "trimmed_mean", "f": 1}},
    "adapters": {"model": {"name": "lora_mlp", "hidden": 16}, "algorithm": "fedit"},
    "regression": {"data": diabetes(), "model": {"name": "mlp_2nn", "hidden": 16}},
    "tokens": {"data": texts(), "model": transformer, "partition": {"num_clients": 6, "samples_per_client": 2}},
    "measured at clients": {
        "evaluation": {"clients_every": 1, "holdout": 0.2, "new_clients": 2},
        "partition": {"num_clients": 30},
    },
    "stopped": {"stop": {"accuracy": 0.01}},
}
SLOW = (
    *("secagg", "central", "ftrl", "sample", "rule", "clipped and quantised", "stopped", "measured at clients"),
    *("adapters", "regression", "groups"),
)
REFUSED: dict[str, dict[str, Any]] = {
    "fedper": {"algorithm": "fedper"},
    "fedmd": {
        "algorithm": "fedmd",
        "public": {"name": "held_out", "fraction": 0.1},
        "models": [{"name": "mlp_2nn", "hidden": 8}],
        "policy": "cohort",
    },
}


def attacked(changes: dict[str, Any]) -> RedTeam:
    """Attack a plan by a clock that goes on whenever it is looked at, whatever the speed of the machine."""
    ticks = itertools.count()
    return red_team(Plan(**{**BASE, **changes}), rounds=1, seconds=600.0, now=lambda: float(next(ticks)))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in PLANS])
def test_a_plan_ends_with_a_page(kind: str) -> None:
    found = attacked(PLANS[kind])
    page = redteam_page(found)
    assert Strict(page).scripts == 0 and "Which setting to change" in page and "http" not in page.split("<main>")[1]
    assert {claim.verdict for claim in found.claims} <= {HOLDS}, found.claims
    assert any(each.figures for each in found.findings) and as_text(found)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["sees"] == found.sees
    assert FAILED not in page
    assert found.seconds <= 1.2 * found.budget
    assert found.poisoned and found.poisoned[0].value is not None
    if kind in ("secagg", "groups", "central", "local", "sample", "ftrl"):
        assert any(change.off and change.findings for change in found.changes) and found.claims


@pytest.mark.parametrize("kind", REFUSED)
def test_a_plan_without_a_shared_model_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="red team"):
        attacked(REFUSED[kind])


OVERLAPPING: dict[str, dict[str, Any]] = {"asynchronous": {"concurrency": 4}, "buffered": {"size": 2, "concurrency": 4}}


@pytest.mark.parametrize("policy", OVERLAPPING)
def test_overlapping_rounds_end_with_a_page_or_a_refusal(policy: str) -> None:
    try:
        found = attacked({"policy": {"name": policy, **OVERLAPPING[policy]}, "devices": "fleet"})
    except PlanError as error:
        assert "red team" in str(error) and "set policy" in str(error)
    else:
        assert Strict(redteam_page(found)).scripts == 0


def test_a_command_without_time_says_so_on_its_page() -> None:
    plan = Plan(**{**BASE, **PLANS["local"]})
    ticks = itertools.count(0, 1000)
    found = red_team(plan, rounds=2, seconds=1.0, now=lambda: float(next(ticks)))
    assert not any(each.figures for each in found.findings)
    page = redteam_page(found)
    assert "there was no time: raise --seconds" in page and "Only 1 of 2 rounds were watched" in page


def test_a_probe_that_breaks_does_not_cost_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: object) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr("atoll.probes.loss_threshold.losses", breaks)
    found = red_team(Plan(**BASE), probes=["loss_threshold", "linear_leak"], rounds=1)
    broken, whole = found.findings
    assert broken.why_not == f"{FAILED} size mismatch" and whole.figures and "size mismatch" in redteam_page(found)


def test_no_attack_is_run_that_has_nothing_to_be_compared_with() -> None:
    left = iter([0.5, *[100.0] * 20])
    found, _ = poison(Plan(**BASE), lambda: next(left), 1.0)
    assert {each.why_not for each in found} == {NO_TIME}
