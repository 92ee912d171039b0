"""Runs of split learning: directories, rows, events, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_end, rows
from split.models import plan_of

from atoll import Plan, compare_personal, resume, run, sweep
from atoll.core.errors import PlanError
from atoll.core.events import Event, RoundCommitted, TasksSent
from atoll.data.dataset import Dataset
from atoll.simulation.dry_run import dry_run
from atoll.simulation.seat import watch

WAYS = ("in_turn", "splitfed_v1", "splitfed_v2")
FIELDS: dict[str, Any] = {
    "partition": {"name": "dirichlet", "num_clients": 6, "alpha": 1.0},
    "policy": {"size": 3},
    "rounds": 4,
    "local": {"steps": 2, "batch_size": 10, "lr": 0.05},
    "evaluation": {"every": 2, "clients_every": 2},
}


def plan_for(way: str, **more: Any) -> Plan:
    split = {"cut": "2", "way": way, "latency": 0.02, "bandwidth": 1e6, "micro_batches": 2, **more}
    return plan_of(split, **FIELDS)


def killed_after(round_number: int, plan: Plan, path: Path) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.row["round"] == round_number:
            os.kill(os.getpid(), signal.SIGKILL)

    run(plan, out=path, watch=[kill], checkpoint_seconds=0.0)


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_a_killed_run_goes_on_to_the_same_bits(way: str, tmp_path: Path) -> None:
    plan = plan_for(way, codecs=[{"name": "quantise", "bits": 8}])
    run(plan, out=tmp_path / "whole")
    child = get_context("fork").Process(target=killed_after, args=(2, plan, tmp_path / "killed"))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [row["round"] for row in rows(tmp_path / "killed")] == [1, 2]
    resume(tmp_path / "killed")
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_what_a_run_writes(tmp_path: Path) -> None:
    seen: list[Event] = []
    result = run(plan_for("splitfed_v2"), out=tmp_path / "run", watch=[seen.append])
    found = rows(tmp_path / "run")
    for key in ("bytes_up", "bytes_down", "messages", "round_trips", "simulated_seconds", "cut_bytes"):
        values = [row[key] for row in found]
        assert values == sorted(values) and values[0] > 0 and values[1] == pytest.approx(2 * values[0], rel=0.05)
    assert found[0]["messages"] == 3 * (2 * 2 * 2 + 2)  # clients, steps, pieces, both ways; and the layers
    assert found[0]["round_trips"] == 2 + 1
    assert sum(isinstance(event, TasksSent) for event in seen) == 4
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == {"name": "inline"}
    assert result.model(result.model[1].weight.new_zeros(2, 1, 8, 8)).shape == (2, 10)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The cut" in page and "after layer 2" in page and "13,000" in page and "42,210" in page


def test_without_links_a_run_takes_no_simulated_time() -> None:
    row = run(plan_of({"cut": "2"}, rounds=1)).history[-1]
    assert "simulated_seconds" not in row and row["round_trips"] == 4


def test_a_run_stops_after_simulated_seconds_or_bytes() -> None:
    whole = run(plan_for("splitfed_v1"))
    first = whole.history[0]
    by_time = run(plan_for("splitfed_v1").replace({"stop.simulated_seconds": first["simulated_seconds"]}))
    assert by_time.history[-1]["round"] == 1 and "simulated" in by_time.reason
    enough = int(1.5 * (first["bytes_up"] + first["bytes_down"]))
    by_bytes = run(plan_for("splitfed_v1").replace({"stop.bytes": enough}))
    assert by_bytes.history[-1]["round"] == 1 and "byte budget" in by_bytes.reason


def test_a_server_momentum_goes_with_splitfed() -> None:
    """The server's step is that of FedAvg with the same algorithm."""
    fields = {**FIELDS, "algorithm": "fedavgm"}
    whole, parts = run(plan_of(**fields)), run(plan_of({"cut": "2"}, **fields))
    assert bool((whole.params_D == parts.params_D).all())


def overflowing() -> Dataset:
    """Three clients, of which the second has features that overflow behind the first layer."""
    rng = np.random.default_rng(0)
    x, y = rng.random((90, 64), dtype=np.float32), rng.integers(0, 10, 90)
    owners = np.repeat(np.arange(3), 30)
    x[owners == 1] *= 3e38
    return Dataset(name="large", train_x=x, train_y=y, test_x=x[:9], test_y=y[:9], num_classes=10, owners=owners)


@pytest.mark.parametrize(("way", "handover"), [*((way, "server") for way in WAYS), ("in_turn", "peer")])
def test_a_client_that_diverges_does_not_count(way: str, handover: str) -> None:
    """Its layers are not averaged; in turn the next client begins with those of the one before."""
    fields: dict[str, Any] = {"data": overflowing, "partition": "natural", "num_clients": 3}
    result = run(plan_of({"cut": "2", "way": way, "handover": handover}, **fields))
    assert result.history[-1]["clients"] == 2 and result.history[-1]["rejected"] == 1
    assert bool(result.params_D.isfinite().all())


def test_a_sweep_of_a_plan_that_is_cut(tmp_path: Path) -> None:
    plan = plan_of({"cut": "2"}, num_clients=2, engine="auto")
    table = sweep(plan, out=tmp_path, grid={"split.cut": ["2", "4"]}, seeds=1, workers=1)
    assert not table.problems and len(table.ranked()) == 2


def test_the_red_team_and_personal_methods_refuse_a_cut(tmp_path: Path) -> None:
    plan = plan_of({"cut": "2"}, num_clients=2)
    with pytest.raises(PlanError, match="leave split out"):
        watch(plan, 1)
    with pytest.raises(PlanError, match="leave split out"):
        compare_personal(plan.replace({"evaluation.holdout": 0.2}), out=tmp_path)


def test_plans_without_a_cut_keep_their_text_and_identity() -> None:
    assert "split" not in Plan().to_toml()
    plan = plan_for("in_turn")
    assert Plan.from_toml(plan.to_toml()) == plan and plan.identity() != plan.replace({"split": None}).identity()


def test_a_dry_run_refuses_a_cut(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cut after one of"):
        dry_run(plan_of({"cut": "5"}))
