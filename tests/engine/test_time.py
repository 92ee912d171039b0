"""Simulated time: devices, deadlines, lost clients, asynchronous rounds and budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import timeless
from members import every

from atoll import Plan, run
from atoll.core.attack import Attack
from atoll.core.devices import Load
from atoll.core.errors import PlanError
from atoll.core.messages import Payload, Task
from atoll.core.parts import examples
from atoll.core.wire import pack
from atoll.rounds.devices.fleet import fleet
from atoll.rounds.devices.stragglers import stragglers
from atoll.rounds.devices.trace import trace
from atoll.train.build import build_job

FLEET = {"name": "fleet", "dropout": 0.1, "spread": 1.5}
POLICIES: dict[str, dict[str, Any]] = {
    "cohort": {"name": "cohort", "size": 4, "over_selection": 1.5, "deadline": 30.0, "min_reports": 2},
    "buffered": {"name": "buffered", "size": 3, "concurrency": 8},
    "asynchronous": {"name": "asynchronous", "concurrency": 6},
}


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("policy", every("rounds"))
def test_engines_agree_and_a_stopped_run_ends_the_same(
    digits_plan: Plan, policy: str, algorithm: str, tmp_path: Path
) -> None:
    settings = POLICIES.get(policy) or {"name": policy, **examples("rounds", policy)[0]}
    plan = digits_plan.replace({"policy": settings, "devices": FLEET, "rounds": 12, "algorithm": algorithm})
    one_by_one = run(plan)
    stacked = plan.replace({"engine": {"name": "vectorised", "stack": 3}})
    together = run(stacked)
    assert (one_by_one.params_D - together.params_D).abs().max() < 2e-5
    workers = [run(plan.replace({"engine": {"name": "processes", "stack": 3, "workers": n}})) for n in (1, 2)]
    assert all(torch.equal(together.params_D, result.params_D) for result in workers)
    run(stacked.replace({"rounds": 5}), out=tmp_path / "run", report=False)
    resumed = run(stacked, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, together.params_D)
    assert timeless(resumed.history) == timeless(together.history)


def test_time_passes_and_clients_are_lost(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"devices": {**FLEET, "dropout": 0.4}, "rounds": 10, "policy": {"size": 5}})
    rows = run(plan).history
    times = [row["simulated_seconds"] for row in rows]
    assert all(np.diff([0.0, *times]) > 0)
    assert rows[-1]["failed"] > 5
    assert all(row["clients"] >= 1 for row in rows)
    params_D = build_job(plan).first_D
    size = len(pack(Payload(params_D)))
    assert rows[-1]["bytes_down"] == 10 * 5 * size  # also those who are lost had the model sent
    assert rows[-1]["bytes_up"] == sum(row["clients"] for row in rows) * size


def test_over_selection_saves_time(digits_plan: Plan) -> None:
    slow, fast = (
        run(digits_plan.replace({"devices": FLEET, "rounds": 20, "policy": {"size": 4, "over_selection": over}}))
        for over in (1.0, 2.0)
    )
    assert fast.history[-1]["simulated_seconds"] < 0.8 * slow.history[-1]["simulated_seconds"]


def test_a_round_that_misses_its_minimum_is_abandoned_and_counted(digits_plan: Plan) -> None:
    policy = {"size": 5, "min_reports": 4}
    plan = digits_plan.replace({"devices": {**FLEET, "dropout": 0.5}, "rounds": 5, "policy": policy})
    rows = run(plan).history
    assert all(row["clients"] >= 4 for row in rows)
    assert rows[-1]["abandoned"] > 0
    never = plan.replace({"policy.deadline": 1e-6})
    result = run(never)
    assert (result.history, result.reason) == ([], "gave up: too many rounds in a row were abandoned")


def test_buffered_rounds_do_not_wait_for_the_slow(digits_plan: Plan) -> None:
    devices = {"name": "fleet", "spread": 1.5, "dropout": 0.1}
    base = digits_plan.replace({"devices": devices, "rounds": 30})
    waiting = run(base.replace({"policy": {"size": 6}}))
    flowing = run(base.replace({"policy": {"name": "buffered", "size": 6, "concurrency": 12}}))
    assert flowing.history[-1]["simulated_seconds"] < waiting.history[-1]["simulated_seconds"] / 2
    late = [row["staleness"] for row in flowing.history]
    assert late[0] == 0 and max(late) > 1


def test_fedasync_mixes_models(digits_plan: Plan) -> None:
    """With one client at work nothing is late: w <- (1 - m) w + m w_k, which is a server step of m."""
    mixed = run(digits_plan.replace({"policy": {"name": "asynchronous", "concurrency": 1, "mixing": 0.3}})).params_D
    alone = run(digits_plan.replace({"policy": {"size": 1}, "server.lr": 0.3})).params_D
    assert torch.allclose(mixed, alone, atol=1e-6)
    late = digits_plan.replace({"rounds": 9, "policy": {"name": "asynchronous", "concurrency": 4}})
    ends = [run(late.replace({"policy.staleness": rule})).params_D for rule in ("constant", "hinge", "polynomial")]
    assert not torch.equal(ends[0], ends[2])
    assert torch.equal(ends[0], ends[1])  # nobody is more than 4 versions late
    with pytest.raises(PlanError, match="did you mean 'hinge'"):
        run(late.replace({"policy.staleness": "hing"}))


def nowhere() -> Attack:
    """Send an update that is no number."""
    return Attack(update=lambda update, knows: update._replace(delta_D=update.delta_D * float("nan")))


@pytest.mark.parametrize("policy", ["buffered", "asynchronous"])
def test_a_client_that_sends_nonsense_does_not_stop_the_others(digits_plan: Plan, policy: str) -> None:
    settings = {"policy": {**POLICIES[policy], "concurrency": 6}, "devices": FLEET, "rounds": 12}
    plan = Plan(**{**digits_plan.replace(settings).to_dict(), "attack": nowhere, "attackers": {"num": 4}})
    result = run(plan)
    assert result.params_D.isfinite().all()
    assert result.history[-1]["rejected"] > 0
    assert result.history[-1]["round"] == 12


def test_nothing_is_left_of_an_abandoned_attempt(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"devices": FLEET, "rounds": 6, "policy": {"size": 5, "min_reports": 5}})
    rows = run(plan).history
    assert rows[-1]["abandoned"] > 0
    assert rows[-1]["rejected"] == 0  # nobody of an old attempt comes late


def test_stragglers_send_a_part_of_their_work_or_nothing(digits_plan: Plan) -> None:
    partial = run(digits_plan.replace({"devices": {"name": "stragglers", "fraction": 0.8}})).history
    dropped = run(digits_plan.replace({"devices": {"name": "stragglers", "fraction": 0.8, "drop": True}})).history
    whole = run(digits_plan).history
    assert [row["clients"] for row in partial] == [5, 5, 5]
    assert [row["clients"] for row in dropped] == [1, 1, 1]
    assert partial[-1]["samples_trained"] < whole[-1]["samples_trained"]
    assert whole[-1]["samples_trained"] == sum(row["samples"] for row in whole)


def test_a_task_done_in_part_takes_part_of_the_steps(digits_plan: Plan) -> None:
    job = build_job(digits_plan)
    from atoll.train.batches import client_batches

    steps = [len(client_batches(job, Task(0, 0, 0, work=work))) for work in (1.0, 0.5, 1e-9)]
    assert steps == [job.num_steps(0), round(job.num_steps(0) / 2), 1]


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({"samples": 3000}, "compute budget spent"),
        ({"simulated_seconds": 60.0}, "simulated time is up"),
        ({"seconds": 0.05}, "time is up"),
        ({"accuracy": 0.5}, "target reached"),
    ],
)
def test_budgets_end_a_run_with_their_reason(digits_plan: Plan, stop: dict[str, Any], reason: str) -> None:
    every = 1 if "accuracy" in stop else 1000
    plan = digits_plan.replace({"stop": stop, "devices": FLEET, "rounds": 1000, "evaluation.every": every})
    result = run(plan)
    last, before = result.history[-1], result.history[-2:][0]
    assert result.reason == reason
    assert "test" in last  # the last round is measured, whatever ended the run
    spent = {
        "samples": [row["samples_trained"] for row in (before, last)],
        "simulated_seconds": [row["simulated_seconds"] for row in (before, last)],
    }
    for name, limit in stop.items():
        if name in spent:
            assert spent[name][0] < limit <= spent[name][1] and before is not last


def test_the_day_swings_by_a_factor_of_four() -> None:
    devices = fleet(diurnal=0.6)
    share = [np.mean([devices.reachable(client, hour * 3600.0) for client in range(4000)]) for hour in (0, 12)]
    assert share[0] / share[1] == pytest.approx(4, rel=0.1)
    assert all(fleet().reachable(client, 0.0) for client in range(10))


def test_eligibility_keeps_clients_out(digits_plan: Plan) -> None:
    rule = {"min_memory": 4000.0}
    plan = digits_plan.replace({"devices": FLEET, "eligibility": rule, "rounds": 8, "policy": {"size": 3}})
    attributes = fleet().attributes
    allowed = {client for client in range(12) if attributes(client, 0.0)["memory"] >= 4000}
    assert 3 < len(allowed) < 12
    scored = run(plan.replace({"algorithm": "scaffold"}), out=None)
    assert scored.history[-1]["round"] == 8
    with pytest.raises(PlanError, match="set devices"):
        run(digits_plan.replace({"eligibility": rule}))


def test_fleets_have_the_speeds_that_they_state() -> None:
    loads = [Load(client, 1000, 2_500_000, 625_000) for client in range(4000)]
    trips = fleet(jitter=0.0, spread=0.0, dropout=0.1).trips(loads, np.random.default_rng(0))
    assert {round(trip.seconds, 9) for trip in trips if not trip.fails} == {1.0 + 10.0 + 1.0}
    assert np.mean([trip.fails for trip in trips]) == pytest.approx(0.1, abs=0.02)
    spread = [trip.seconds for trip in fleet(dropout=0.0).trips(loads, np.random.default_rng(0))]
    assert np.percentile(spread, 99) > 5 * np.median(spread)
    work = [trip.work for trip in stragglers(0.9).trips(loads, np.random.default_rng(0))]
    assert np.mean(np.array(work) < 1) == pytest.approx(0.9)


def test_devices_come_from_a_file(tmp_path: Path, digits_plan: Plan) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("samples_per_second,down_mbps,up_mbps,from_hour,to_hour\n100,8,8,22,6\n50,8,8,6,22\n")
    devices = trace(str(path))
    loads = [Load(client, 100, 1_000_000, 0) for client in range(200)]
    seconds = [trip.seconds for trip in devices.trips(loads, np.random.default_rng(0))]
    assert {round(value, 6) for value in seconds} == {2.0, 3.0}
    assert [devices.reachable(i, 0.0) for i in range(200)] == [value < 2.5 for value in seconds]
    assert run(digits_plan.replace({"devices": {"name": "trace", "path": str(path)}})).history[-1]["round"] == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ("", "no rows"),
        ("samples_per_second,down_mbps\n1,2\n", "lacks columns"),
        ("samples_per_second,down_mbps,up_mbps\n1,2,fast\n", "line 2"),
        ("samples_per_second,down_mbps,up_mbps\n1,0,1\n", "above 0"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "devices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=problem):
        trace(str(path))
