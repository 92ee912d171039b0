"""No plan turns without progress: it runs to its end, or ends with a reason after a bounded number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Plan, run
from atoll.core.coordinator import Coordinator, CoordinatorState, Event, Reason, Step
from atoll.core.detection import Detector
from atoll.report.record import read_state

MOST_STEPS = 20_000
"""Far more than any of these plans takes to its end, and few enough to be over in seconds."""
LOSSY = {"name": "stragglers", "fraction": 0.6, "drop": True}
NEVER = {"name": "stragglers", "fraction": 1.0, "drop": True}
BUFFERED = {"name": "buffered", "size": 3, "concurrency": 6}
ASYNCHRONOUS = {"name": "asynchronous", "concurrency": 6}
FLEET = {"name": "fleet", "dropout": 0.1}


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail instead of hanging: count the steps of the coordinator."""
    taken, step = 0, Coordinator.step

    def counted(self: Coordinator, state: CoordinatorState, event: Event) -> Step:
        nonlocal taken
        taken += 1
        assert taken < MOST_STEPS, f"no end after {taken} steps"
        return step(self, state, event)

    monkeypatch.setattr(Coordinator, "step", counted)


ENDS: dict[str, tuple[dict[str, Any], Reason]] = {
    "most replacements are lost, buffered": ({"policy": BUFFERED, "devices": LOSSY}, Reason.ALL_ROUNDS),
    "most replacements are lost, asynchronous": ({"policy": ASYNCHRONOUS, "devices": LOSSY}, Reason.ALL_ROUNDS),
    "most replacements are lost, one at a time": ({"policy": {"size": 1}, "devices": LOSSY}, Reason.ALL_ROUNDS),
    "19 of 20 tasks are lost": (
        {"policy": BUFFERED, "devices": {"name": "fleet", "dropout": 0.95}},
        Reason.ALL_ROUNDS,
    ),
    "all tasks are lost, cohorts": ({"devices": NEVER}, Reason.GAVE_UP),
    "all tasks are lost, buffered": ({"policy": BUFFERED, "devices": NEVER}, Reason.ALL_LOST),
    "all tasks are lost, asynchronous": ({"policy": ASYNCHRONOUS, "devices": NEVER}, Reason.ALL_LOST),
    "nobody is eligible, cohorts": ({"devices": FLEET, "eligibility.min_memory": 1e9}, Reason.GAVE_UP),
    "nobody is eligible, buffered": (
        {"policy": BUFFERED, "devices": FLEET, "eligibility.min_memory": 1e9},
        Reason.GAVE_UP,
    ),
    "fewer are eligible than fill a buffer": (
        {"policy": {**BUFFERED, "size": 6}, "devices": FLEET, "eligibility.min_memory": 8000.0},
        Reason.GAVE_UP,
    ),
    "nobody meets the deadline": (
        {"policy": {"size": 5, "deadline": 1e-6}, "devices": FLEET},
        Reason.GAVE_UP,
    ),
    "nobody is drawn, cohorts": ({"sampler": {"name": "poisson", "rate": 1e-9}}, Reason.GAVE_UP),
    "nobody is drawn, buffered": (
        {"policy": {**BUFFERED, "size": 6}, "sampler": {"name": "poisson", "rate": 1e-9}},
        Reason.GAVE_UP,
    ),
    "no sum opens": ({"policy": {"size": 3}, "secagg": {"lost": 0.99}}, Reason.GAVE_UP),
    "a private cohort is always lost": (
        {
            "privacy": {"name": "distributed", "clip": 1.0, "sigma": 1.0, "delta": 1e-3, "test_noise": True},
            "secagg": {},
            "devices": NEVER,
        },
        Reason.GAVE_UP,
    ),
    "a private run has a budget": (
        {
            "privacy": {
                "name": "central",
                "clip": 1.0,
                "sigma": 4.0,
                "delta": 1e-3,
                "epsilon": 0.7,
                "test_noise": True,
            },
            "sampler": {"name": "poisson", "rate": 0.2},
            "rounds": 10_000,
            "evaluation.every": 0,
        },
        Reason.PRIVACY,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_plan_ends_with_a_reason(digits_plan: Plan, name: str) -> None:
    settings, reason = ENDS[name]
    plan = digits_plan.replace({"evaluation.every": 100, "local.steps": 1, **settings})
    result = run(plan)
    assert result.reason == reason
    assert result.params_D.isfinite().all()
    if reason is Reason.ALL_ROUNDS:
        assert len(result.history) == plan.rounds
    if result.history:
        assert "test" in result.history[-1]


@pytest.mark.parametrize("policy", [{"size": 5}, BUFFERED, ASYNCHRONOUS], ids=lambda policy: str(policy.get("name")))
def test_attackers_that_always_send_nan_end_a_run_with_a_reason(digits_plan: Plan, policy: dict[str, Any]) -> None:
    result = run(digits_plan.replace({"policy": policy, "local.steps": 1, "attack": "not_finite", "attackers.num": 12}))
    assert (result.reason, result.history) == (Reason.GAVE_UP, [])


def test_nothing_is_remembered_of_lost_tasks(digits_plan: Plan, tmp_path: Path) -> None:
    result = run(
        digits_plan.replace({"policy": BUFFERED, "devices": LOSSY, "rounds": 20}), out=tmp_path / "run", report=False
    )
    assert result.history[-1]["failed"] > 20
    state = read_state(tmp_path / "run" / "checkpoint.safetensors", result.plan.identity())
    assert set(state.works) <= {*state.coordinator.in_flight.values(), *state.coordinator.arrived}


def test_a_run_waits_through_the_hours_in_which_nobody_can_be_reached(digits_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("samples_per_second,down_mbps,up_mbps,from_hour,to_hour\n0.05,8,8,22,6\n")  # hours for a round
    result = run(digits_plan.replace({"devices": {"name": "trace", "path": str(path)}, "rounds": 20}))
    assert result.reason == Reason.ALL_ROUNDS
    waits = np.diff([row["simulated_seconds"] for row in result.history])
    assert 14 * 3600 < waits.max() < 20 * 3600


def suspicious() -> Detector:
    """Trust nobody."""
    return Detector(lambda sight: torch.zeros(len(sight.updates_CD)), threshold=0.5, decay=0.0)


def test_a_server_that_trusts_nobody_keeps_enough_clients_to_go_on(digits_plan: Plan) -> None:
    result = run(Plan(**{**digits_plan.replace({"rounds": 20}).to_dict(), "detection": suspicious}))
    assert result.reason == Reason.ALL_ROUNDS
    assert len(result.history[-1]["detection"]["quarantined"]) == 11
