"""Searches by Optuna: what is tried depends on the plan and the ranges, not on workers or stops."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import PlanError, RunError
from atoll.core.plan import Plan
from atoll.report.sweep import SweepTable
from atoll.sweeps.run import sweep
from atoll.sweeps.search import BATCH, JOURNAL, read_range

PLAN = Plan(
    rounds=2,
    partition={"name": "iid", "num_clients": 3},
    local={"steps": 2},
    evaluation={"validation": 0.1},
    engine="inline",
)
SPACE = {"local.lr": "log:0.001:1", "local.steps": "int:1:4", "algorithm": 'choice:fedavg,{name="fedprox",mu=1.0}'}


def without_seconds(table: SweepTable) -> SweepTable:
    return replace(table, runs=tuple(replace(run, seconds=0.0) for run in table.runs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lgo:0.1:1", "did you mean 'log'"),
        ("0.1,1", "write log:0.001:1"),
        ("log:0.1", "two numbers"),
        ("float:a:b", "two numbers"),
        ("int:1:2.5", "two numbers"),
        ("float:0:inf", "the first number must be the smaller one"),
        ("int:5:5", "the first number must be the smaller one"),
        ("log:0:1", "begins above 0"),
        ("choice:", "two or more"),
        ("choice:a,a", "two or more"),
    ],
)
def test_a_bad_range_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_range("local.lr", text)


def test_bad_searches_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for search, trials, message in (
        ({}, 3, "has no ranges"),
        ({"local.lr": "log:0.1:1"}, 0, "trials must be at least 1"),
        ({"local.lrr": "log:0.1:1"}, 3, "unknown key"),
        ({"local.lr": "float:-1:1"}, 3, "local.lr=-1 is refused"),
        ({"algorithm": "choice:fedavg,fedpox"}, 3, "did you mean 'fedprox'"),
        ({"seed": "int:0:5"}, 3, "--seeds"),
    ):
        with pytest.raises(PlanError, match=message):
            sweep(PLAN, search=search, trials=trials, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_without_optuna_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RunError, match=r"pip install 'atoll\[search\]'"):
        sweep(PLAN, search=SPACE, trials=3, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="searches need Optuna: pip install 'atoll[search]'")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise, also if whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [2, pytest.param(BATCH + 1, marks=pytest.mark.slow)])
def test_workers_and_stops_change_nothing_of_what_is_tried(optuna: Any, number: int, tmp_path: Path) -> None:
    """A search is stopped in its first or in its second batch."""
    stops = {"name": "helpers:stops", "mark": str(tmp_path / "mark"), "attempt": 1, "number": number}
    plan = PLAN.replace({"attack": stops, "attackers.num": 1})
    asked: dict[str, Any] = {"search": SPACE, "trials": BATCH + 2, "seeds": 1}
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, **asked, out=stopped, workers=2)
    assert not (stopped / "sweep.json").exists()
    resumed = sweep(plan, **asked, out=stopped, workers=3)
    whole = sweep(plan, **asked, out=tmp_path / "whole", workers=1)
    assert without_seconds(resumed) == without_seconds(whole)
    for name in ("sweep.csv", "best.toml"):
        assert (stopped / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    lrs = [each["local.lr"] for each in whole.combinations]
    assert len(lrs) == BATCH + 2 and len(set(lrs)) == len(lrs) and all(0.001 <= lr <= 1 for lr in lrs)
    assert {each["local.steps"] for each in whole.combinations} <= {1, 2, 3, 4}
    assert any(each["algorithm"] == {"name": "fedprox", "mu": 1.0} for each in whole.combinations)
    assert whole.is_search and (stopped / "sweep.html").read_text().count("<img ") == 2


def test_more_trials_go_on_and_other_ranges_are_refused(optuna: Any, tmp_path: Path) -> None:
    few = sweep(PLAN, search={"local.lr": "log:0.001:1"}, trials=2, seeds=1, out=tmp_path)
    more = sweep(PLAN, search={"local.lr": "log:0.001:1"}, trials=4, seeds=1, out=tmp_path)
    assert more.combinations[:2] == few.combinations and len(more.combinations) == 4
    assert more.runs[:2] == few.runs
    with pytest.raises(RunError, match=r"differs in ranges: .*choose another --out"):
        sweep(PLAN, search={"local.lr": "log:0.01:1"}, trials=4, seeds=1, out=tmp_path)
    with pytest.raises(RunError, match="differs in plan"):
        sweep(PLAN.replace({"rounds": 3}), search={"local.lr": "log:0.001:1"}, trials=4, seeds=1, out=tmp_path)


def test_the_study_is_optunas_own_and_failures_count_as_worst(
    optuna: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    words = ["--search", "local.lr=choice:0.1,1e30", "--trials", "6", "--seeds", "1", "--out", "s", "-q"]
    said = cli("sweep", "plan.toml", *words)
    assert said.code == 0, said.err
    storage = optuna.storages.journal
    journal = storage.JournalStorage(storage.JournalFileBackend(str(tmp_path / "s" / JOURNAL)))
    study = optuna.load_study(study_name="atoll", storage=journal)
    written = json.loads((tmp_path / "s/sweep.json").read_text())
    assert len(study.trials) == 6 and written["best"] == {"local.lr": 0.1}
    states = {trial.params["local.lr"]: trial.state.name for trial in study.trials}
    assert states == {"0.1": "COMPLETE", "1e30": "PRUNED"}
    assert study.best_value == max(each["figure"]["mean"] for each in written["combinations"] if "figure" in each)
