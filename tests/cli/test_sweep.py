"""Sweeps: every cell is an ordinary run, its figures are computed again, and nothing runs before all is checked."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import problem_data
import pytest
from network.fork_server import ForkServer

import atoll
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.report.sweep import SweepRun, SweepTable, notes, table_text
from atoll.sweeps.run import sweep
from atoll.train.build import build_job

PLAN = Plan(
    rounds=3,
    partition={"name": "iid", "num_clients": 4},
    local={"steps": 4},
    evaluation={"validation": 0.1},
    engine="inline",
)
PROX = {"name": "fedprox", "mu": 1.0}
GRID: dict[str, list[Any]] = {"local.lr": [0.02, 0.3], "algorithm": ["fedavg", PROX]}


def without_seconds(table: SweepTable) -> SweepTable:
    return replace(table, runs=tuple(replace(run, seconds=0.0) for run in table.runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep") / "grid"


@pytest.fixture(scope="module")
def table(folder: Path) -> SweepTable:
    return atoll.sweep(PLAN, grid=GRID, seeds=2, out=folder, workers=2)


def on_validation(plan: Plan, model: Any) -> float:
    """The share of right answers on all samples that clients set apart."""
    job = build_job(plan)
    pairs = [job.federation.validation_samples(client).load() for client in range(4)]
    right = sum(int((model(job.inputs(x)).argmax(1) == y).sum()) for x, y in pairs)
    return right / sum(len(y) for _, y in pairs)


def test_figures_are_those_of_runs_on_their_own(table: SweepTable) -> None:
    assert [dict(each) for each in table.combinations] == [
        {"local.lr": lr, "algorithm": algorithm} for lr in (0.02, 0.3) for algorithm in ("fedavg", PROX)
    ]
    for place, settings in enumerate(table.combinations):
        figures, tests = [], []
        for seed, run in zip((0, 1), table.of(place), strict=True):
            plan = PLAN.replace({**settings, "seed": seed})
            alone = atoll.run(plan)
            figures.append(on_validation(plan, alone.model))
            tests.append(alone.accuracy)
            assert (run.seed, run.status, run.rounds) == (seed, "done", 3)
            assert run.bytes_up == alone.history[-1]["bytes_up"]
        row = table.row(place)
        assert row is not None and row.test is not None
        assert row.figure == pytest.approx((np.mean(figures), np.std(figures, ddof=1)))
        assert row.test == pytest.approx((np.mean(tests), np.std(tests, ddof=1)))
    means = [row.figure.mean for row in table.ranked()]
    assert means == sorted(means, reverse=True) and means[0] > means[-1]


def test_the_best_plan_is_written_out_and_runs(table: SweepTable, folder: Path, cli: Callable[..., Any]) -> None:
    best = table.best
    assert best is not None
    text = (folder / "best.toml").read_text()
    assert text.startswith("# The best of 4 combinations by accuracy on clients' validation samples; seeds 0, 1.\n")
    assert Plan.from_toml(text) == PLAN.replace(dict(best.settings))
    said = cli("run", folder / "best.toml", "--out", "best", "-q")
    assert said.code == 0, said.err
    result = json.loads(Path("best/result.json").read_text())
    assert result["test"]["accuracy"] == table.of(best.combination)[0].test


def test_files_hold_the_table(table: SweepTable, folder: Path) -> None:
    written = json.loads((folder / "sweep.json").read_text())
    best = table.best
    assert best is not None
    assert written["best"] == dict(best.settings) and written["chosen_on"] == "validation"
    assert [each["figure"]["mean"] for each in written["combinations"]] == [
        row.figure.mean for place in range(4) if (row := table.row(place))
    ]
    lines = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [float(line["figure"]) for line in lines] == [run.figure for run in table.runs]
    assert {line["algorithm"] for line in lines} == {"fedavg", "fedprox (mu 1)"}
    page = (folder / "sweep.html").read_text()
    assert page.count("<img ") == 2 and "http-equiv" in page and "{{" not in page and 'src="http' not in page
    assert "chosen on clients&#x27; validation samples" in page and '<p class="warning">' not in page


def test_workers_change_nothing(table: SweepTable, folder: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        other = sweep(PLAN, grid=GRID, seeds=[0, 1], out=tmp_path / str(workers), workers=workers)
        assert without_seconds(other) == without_seconds(table)
        for name in ("sweep.csv", "best.toml"):
            assert (tmp_path / str(workers) / name).read_bytes() == (folder / name).read_bytes()


def test_a_changed_grid_adds_cells(tmp_path: Path) -> None:
    first = sweep(PLAN, grid={"local.lr": [0.1]}, seeds=1, out=tmp_path)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/model.safetensors")}
    more = sweep(PLAN, grid={"local.lr": [0.1, 0.2]}, seeds=2, out=tmp_path)
    assert len(made) == 1 and len(list(tmp_path.glob("cells/*/model.safetensors"))) == 4
    assert all(path.stat().st_mtime_ns == when for path, when in made.items())
    assert more.runs[0] == first.runs[0]
    assert sweep(PLAN, grid={"local.lr": [0.1]}, seeds=1, out=tmp_path) == first


def test_a_cell_that_fails_keeps_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    plan = PLAN.replace({"attackers.num": 1, "attack": "zero"})
    table = sweep(plan, grid={"attack": ["helpers:breaks", "zero"]}, seeds=2, out=tmp_path / "raises", workers=2)
    assert [run.status for run in table.runs] == ["failed", "failed", "done", "done"]
    text = table_text(table)
    assert table.why(0).startswith("failed: ") and "ValueError: no more" in table.why(0) and table.why(0) in text
    assert text.splitlines()[1].startswith("zero") and table.best is not None and table.best.combination == 1
    assert "ValueError: no more" in (tmp_path / "raises/sweep.html").read_text()
    diverging = sweep(PLAN, grid={"local.lr": [1e30, 0.1]}, seeds=1, out=tmp_path / "diverges")
    assert [run.status for run in diverging.runs] == ["failed", "done"] and "hold NaN or Inf" in diverging.why(0)


def test_what_some_combinations_do_not_allow_is_refused_there_alone(tmp_path: Path) -> None:
    rule = [{"name": "trimmed_mean", "f": 1}, "mean"]
    grid = {"aggregator": rule, "partition.num_clients": [2, 4]}
    table = sweep(PLAN, grid=grid, seeds=1, out=tmp_path)
    assert [run.status for run in table.runs] == ["refused", "done", "done", "done"]
    assert "refused: " in table.why(0) and len(list(tmp_path.glob("cells/*"))) == 3
    assert any("different samples" in note for note in notes(table))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "has no grid"),
        ({"local.lr": []}, "no values for local.lr"),
        ({"local.lr": [None]}, "no values for local.lr"),
        ({"local.lr": 0.1}, "must be a list"),
        ({"local.lr": [0.1, 0.1]}, r"local.lr=0.1 twice"),
        ({"local.lrr": [0.1]}, "did you mean 'local.lr'|did you mean 'lr'"),
        ({"algorithm": ["fedavg", "fedpox"]}, "algorithm=fedpox is refused: .*did you mean 'fedprox'"),
        ({"algorithm": ["fedprox"], "algorithm.nu": [1]}, "no option 'nu'"),
        ({"local.lr": [0.1, -1]}, "local.lr=-1 is refused"),
        ({"local.lr": [0.1, "fast"]}, "local.lr=fast is refused"),
        ({"local.lr": [0.1, None]}, "the same plan"),
        ({"seed": [1, 2]}, "--seeds"),
        ({"engine.workers": [1, 2]}, "--workers"),
        ({"evaluation": [{}]}, "set it in the plan"),
        ({"evaluation.holdout": [0.1, 0.2]}, "set it in the plan"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(grid: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        sweep(PLAN, grid=grid, seeds=1, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_other_arguments_are_refused_too(tmp_path: Path) -> None:
    for options, message in (
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": [1, 1]}, "each once"),
        ({"workers": 0}, "workers"),
        ({"trials": 3}, "there is no search"),
        ({"search": {"local.lr": "log:0.1:1"}}, "not both"),
    ):
        with pytest.raises(PlanError, match=message):
            sweep(PLAN, grid={"local.lr": [0.1]}, out=tmp_path / "no", **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no client has so many samples"):
        sweep(PLAN.replace({"evaluation.validation": 1e-4}), grid={"local.lr": [0.1]}, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("evaluation", "by", "words"),
    [
        ({}, "test", "chosen on the test set, so that its figure there is too good to be reported"),
        ({"holdout": 0.2}, "holdout", "chosen on clients' held-out samples"),
        ({"holdout": 0.2, "validation": 0.1}, "validation", "chosen on clients' validation samples"),
    ],
)
def test_the_table_says_on_what_the_best_was_chosen(
    evaluation: dict[str, float], by: str, words: str, tmp_path: Path
) -> None:
    plan = PLAN.replace({"evaluation": {**evaluation, "clients_every": 1}, "rounds": 2})
    table = sweep(plan, grid={"local.lr": [0.1]}, seeds=1, out=tmp_path)
    [run] = table.runs
    assert table.chosen_on == by and words in table_text(table)
    page = (tmp_path / "sweep.html").read_text()
    assert ('<p class="warning">' in page) == (by == "test")
    assert (run.figure == run.test) == (by == "test")
    if by == "holdout":  # what the run itself says of its clients, of one size each
        last = json.loads((tmp_path / run.directory / "metrics.jsonl").read_text().splitlines()[-1])
        assert run.figure == pytest.approx(last["clients_test"]["mean"], abs=0.01)


def test_models_that_clients_keep_are_measured_at_their_clients(tmp_path: Path) -> None:
    plan = PLAN.replace({"algorithm": "ditto", "evaluation": {"holdout": 0.3, "clients_every": 1}, "rounds": 2})
    [run] = sweep(plan, grid={"local.lr": [0.1]}, seeds=1, out=tmp_path).runs
    last = json.loads((tmp_path / run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert run.figure == pytest.approx(last["clients_test"]["mean"], abs=0.01)
    assert abs(last["clients_test"]["mean"] - last["shared_test"]["mean"]) > 0.02


def test_smaller_is_better_for_a_regression(tmp_path: Path) -> None:
    plan = Plan(
        rounds=2, data=problem_data.diabetes, partition={"name": "iid", "num_clients": 5}, engine="inline",
        evaluation={"validation": 0.2},
    )  # fmt: skip
    table = sweep(plan, grid={"local.lr": [1e-4, 0.05]}, seeds=1, out=tmp_path)
    best = table.best
    assert table.metric == "rmse" and not table.larger_is_better and best is not None
    assert best.settings == {"local.lr": 0.05}
    assert best.figure.mean == min(run.figure for run in table.runs if run.figure is not None)
    assert "a smaller root mean squared error is better" in table_text(table)


def test_a_combination_that_lacks_a_seed_comes_after_all_others() -> None:
    figures = {(0, 0): 0.9, (0, 1): None, (1, 0): 0.5, (1, 1): 0.6}
    runs = [
        SweepRun(combination=place, seed=seed, status="failed" if value is None else "done", why="x", figure=value)
        for (place, seed), value in figures.items()
    ]
    table = SweepTable(
        title="", metric="accuracy", larger_is_better=True, chosen_on="test", keys=("k",), seeds=(0, 1),
        combinations=({"k": 1}, {"k": 2}), runs=tuple(runs),
    )  # fmt: skip
    assert [row.combination for row in table.ranked()] == [1, 0]
    assert table.why(0) == "seed 1 failed: x" and any("come after all others" in note for note in notes(table))


def test_a_choice_between_protected_runs_is_named(tmp_path: Path) -> None:
    table = sweep(PLAN.replace({"rounds": 1}), grid={"secagg": [{}, None]}, seeds=1, out=tmp_path)
    assert [run.status for run in table.runs] == ["done", "done"] and table.protection == "secure aggregation"
    assert "no guarantee covers it" in table_text(table) and "left out" in table_text(table)
    assert "no guarantee covers it" in (tmp_path / "sweep.html").read_text().partition("<section>")[0]


def test_functions_and_parts_may_be_values(tmp_path: Path) -> None:
    grid = {"model": [atoll.Part("mlp_2nn", hidden=4), helpers.dropped], "local.lr": [0.1, 0.10000001]}
    table = sweep(PLAN.replace({"rounds": 1}), grid=grid, seeds=1, out=tmp_path)
    written = json.loads((tmp_path / "sweep.json").read_text())
    models = [each["settings"]["model"] for each in written["combinations"]]
    assert models == [{"name": "mlp_2nn", "hidden": 4}] * 2 + ["helpers:dropped"] * 2
    assert [run.status for run in table.runs] == ["done"] * 4


def test_the_command_prints_the_table(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    values = ["--grid", "local.lr=0.02,0.3", "--grid", 'algorithm=fedavg,{name="fedprox",mu=1.0}']
    said = cli("sweep", "plan.toml", *values, "--seeds", "1", "--set", "rounds=1", "--out", "s", "-q")
    assert said.code == 0, said.err
    head, first, *_ = said.out.splitlines()
    assert head.split("  ")[0] == "local.lr" and first.startswith("0.3") and "fedprox (mu 1)" in said.out
    assert "page s/sweep.html" in said.out and "atoll run s/best.toml" in said.out
    failing = cli("sweep", "plan.toml", "--grid", "local.lr=1e30", "--seeds", "0,7", "--out", "t", "-q")
    assert failing.code == 4 and "the table says why" in failing.err and "hold NaN or Inf" in failing.out
    assert not (tmp_path / "t/best.toml").exists()
    for words, message in (
        ([], "has no grid"),
        (["--grid", "local.lr"], "must be KEY=VALUE"),
        (["--grid", "local.lr="], "no values for local.lr"),
        (["--grid", "local.lr=0.1", "--grid", "local.lr=0.2"], "twice"),
        (["--grid", "local.lr=0.1", "--seeds", "x"], "--seeds"),
    ):
        refused = cli("sweep", "plan.toml", *words, "--out", "no")
        assert refused.code == 2 and message in refused.err


def test_a_sweep_that_is_killed_goes_on_to_the_same_table(processes: ForkServer, tmp_path: Path) -> None:
    stops = {"name": "helpers:stops", "mark": str(tmp_path / "mark"), "attempt": 2, "number": 2, "kill": True}
    plan = PLAN.replace({"attack": stops, "attackers.num": 1})
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    words = ["sweep", "plan.toml", "--grid", "local.lr=0.02,0.1", "--seeds", "2", "--workers", "2", "--out", "s"]
    worker = processes.start(words, tmp_path / "out.txt", tmp_path)
    assert worker.wait(120) == -signal.SIGKILL, worker.said
    begun = list(tmp_path.glob("s/cells/*/metrics.jsonl"))
    assert begun and not list(tmp_path.glob("s/sweep.*"))
    asked: dict[str, Any] = {"grid": {"local.lr": [0.02, 0.1]}, "seeds": 2}
    resumed = sweep(plan, **asked, out=tmp_path / "s")
    assert all(run.status == "done" for run in resumed.runs)
    assert without_seconds(resumed) == without_seconds(sweep(plan, **asked, out=tmp_path / "whole"))
    assert (tmp_path / "s/sweep.csv").read_bytes() == (tmp_path / "whole/sweep.csv").read_bytes()
