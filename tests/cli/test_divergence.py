"""A run whose model or metrics are not finite says so: in its result, files, report, exit code and matrix."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless

from atoll import Plan, run
from atoll.core.coordinator import Reason
from atoll.matrix import run_matrix
from atoll.report.html import write_report
from atoll.report.matrix import NO_ATTACK
from atoll.report.reading import read_run

OVERFLOWS = {"algorithm": {"name": "helpers:overflowing", "after": 2}, "rounds": 5}
"""The third version is not finite."""
UNMEASURABLE = {"server.lr": 1e20, "rounds": 1}
"""The only version is finite, and so large that its outputs are not."""


def strict(path: Path) -> list[Any]:
    """Read JSON, or lines of it, as readers do that know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path.name} holds {word}, which is no JSON")

    text = path.read_text()
    pieces = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [json.loads(piece, parse_constant=refuse) for piece in pieces]


def test_a_version_that_overflows_ends_the_run_and_the_last_finite_one_is_kept(
    digits_plan: Plan, tmp_path: Path
) -> None:
    whole = run(digits_plan.replace({"rounds": 2}))
    result = run(digits_plan.replace({**OVERFLOWS, "evaluation.every": 100}), out=tmp_path / "run")
    assert result.reason == Reason.DIVERGED
    assert torch.equal(result.params_D, whole.params_D)
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.state_dict().values())
    assert [row["round"] for row in result.history] == [1, 2]
    assert result.test == whole.test  # the last version that counts is measured
    [found] = strict(tmp_path / "run" / "result.json")
    assert (found["reason"], found["rounds"], found["test"]) == (Reason.DIVERGED, 2, whole.test)
    assert "ends after round 2: diverged" in (tmp_path / "run" / "log.txt").read_text()
    again = run(result.plan, out=tmp_path / "run", report=False, resume=True)
    assert (again.reason, timeless(again.history)) == (result.reason, timeless(result.history))


def test_a_first_version_that_overflows_leaves_the_model_as_it_began(digits_plan: Plan, tmp_path: Path) -> None:
    result = run(digits_plan.replace({"server.lr": 1e39}), out=tmp_path / "run", report=False)
    assert (result.reason, result.history) == (Reason.DIVERGED, [])
    assert result.params_D.isfinite().all()
    assert strict(tmp_path / "run" / "result.json")[0]["rounds"] == 0
    assert "diverged" in write_report([tmp_path / "run"]).read_text()


def test_metrics_that_are_not_finite_at_the_end_are_no_success(digits_plan: Plan, tmp_path: Path) -> None:
    plan = digits_plan.replace({**UNMEASURABLE, "evaluation.clients_every": 1})
    result = run(plan, out=tmp_path / "run", report=False)
    assert result.reason == Reason.DIVERGED
    assert result.params_D.isfinite().all()
    assert math.isnan(result.test["loss"])
    for name in ("result.json", "metrics.jsonl", "clients.json", "run.json"):
        strict(tmp_path / "run" / name)
    record = read_run(tmp_path / "run")
    assert record.rows[-1]["test"]["loss"] is None
    assert "lower local.lr or server.lr" in write_report([tmp_path / "run"]).read_text()
    again = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert (again.reason, math.isnan(again.test["loss"])) == (Reason.DIVERGED, True)


def test_a_model_that_recovers_has_not_diverged(digits_plan: Plan) -> None:
    """Metrics in the middle of a run may be anything: only the end counts."""
    result = run(digits_plan.replace({"local.lr": 1e8, "local.steps": 1, "rounds": 6, "server.max_norm": 1e300}))
    assert result.reason == Reason.ALL_ROUNDS
    assert math.isfinite(result.test["loss"])


@pytest.mark.parametrize("settings", [OVERFLOWS, UNMEASURABLE], ids=["overflows", "unmeasurable"])
def test_the_command_line_ends_with_an_error(
    digits_plan: Plan, settings: dict[str, Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(digits_plan.replace(settings).to_toml())
    said = cli("run", "plan.toml", "--out", "run")
    assert said.code == 4
    assert said.err.splitlines()[-1].startswith("error: diverged: the model or its metrics are not finite; see the")
    assert "report run/report.html" in said.out
    assert cli("report", "run").code == 0
    assert cli("report", "run", "run", "--out", "both.html").code == 0
    assert "diverged" in (tmp_path / "both.html").read_text()


def test_a_run_that_gave_up_leaves_a_report(digits_plan: Plan, cli: Callable[..., Any], tmp_path: Path) -> None:
    never = digits_plan.replace({"devices": {"name": "stragglers", "fraction": 1.0, "drop": True}})
    (tmp_path / "plan.toml").write_text(never.to_toml())
    said = cli("run", "plan.toml", "--out", "run")
    assert said.code == 4
    assert "gave up" in said.err.splitlines()[-1]
    assert "gave up" in (tmp_path / "run" / "report.html").read_text()


def test_a_matrix_counts_a_model_that_diverged_as_guessing(tmp_path: Path) -> None:
    plan = Plan(rounds=2, partition={"name": "iid", "num_clients": 6}, local={"lr": 0.1, "steps": 2}, engine="inline")
    found = run_matrix(plan.replace(OVERFLOWS), attacks=["zero"], defences=["mean"], f=[1], out=tmp_path, workers=1)
    for outcome in found.outcomes:
        assert (outcome.status, outcome.accuracy, outcome.why) == ("done", 0.1, Reason.DIVERGED)
    assert found.mean("accuracy", NO_ATTACK, "mean", 1) == 0.1
    assert "0.1" in (tmp_path / "matrix.csv").read_text()
