"""Attacks against defences: every cell is an ordinary run, and whatever happens to one leaves the others alone."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network.fork_server import ForkServer

from atoll.api import run
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.matrix import part_of, run_matrix
from atoll.report.matrix import NO_ATTACK, Matrix, Outcome, worst_text
from atoll.report.reading import read_run

PLAN = Plan(
    rounds=3,
    partition={"name": "iid", "num_clients": 8},
    policy={"size": 6},
    local={"lr": 0.1, "steps": 4},
    engine="inline",
)
BACKDOOR = "backdoor:target=3:share=1"
SMALL: dict[str, Any] = {"attacks": ["sign_flip:scale=4", BACKDOOR], "defences": ["mean", "nnm+krum"], "f": [1, 2]}


def test_names_take_options_and_say_what_is_wrong() -> None:
    assert part_of("alie:factor=1.5", "attacks") == Part("alie", factor=1.5)
    assert part_of("helpers:breaks", "attacks") == Part("helpers:breaks")
    with pytest.raises(PlanError, match="did you mean 'factor'"):
        part_of("ipm:facto=1", "attacks")
    with pytest.raises(PlanError, match="did you mean 'krum'"):
        run_matrix(PLAN, attacks=["alie"], defences=["krm"], f=[1], out="nowhere")
    with pytest.raises(PlanError, match="median cannot be put before another rule; these can: bucketing, nnm"):
        run_matrix(PLAN, attacks=["alie"], defences=["median+krum"], f=[1], out="nowhere")
    with pytest.raises(PlanError, match=r"nnm needs a rule after it, e.g. nnm\+trimmed_mean"):
        run_matrix(PLAN, attacks=["alie"], defences=["nnm"], f=[1], out="nowhere")
    with pytest.raises(PlanError, match="f is a number of bad clients"):
        run_matrix(PLAN, attacks=["alie"], defences=["mean"], f=[0], out="nowhere")


def test_bad_clients_are_added_where_the_plan_says_so(tmp_path: Path) -> None:
    plan = PLAN.replace({"attackers": {"added": 1}, "policy": "cohort", "partition.num_clients": 4})
    found = run_matrix(plan, attacks=["zero"], defences=["mean"], f=[2], out=tmp_path, workers=1)
    clients = [read_run(tmp_path / cell.directory).rows[-1]["clients"] for cell in found.outcomes]
    assert clients == [4, 6]  # without an attack, and with one


def test_cells_are_runs_and_workers_change_nothing(tmp_path: Path) -> None:
    one = run_matrix(PLAN, **SMALL, out=tmp_path / "one", workers=1)
    two = run_matrix(PLAN, **SMALL, out=tmp_path / "two", workers=3)
    assert one == two
    assert (tmp_path / "one/matrix.csv").read_bytes() == (tmp_path / "two/matrix.csv").read_bytes()
    for outcome in one.outcomes:
        impossible = outcome.defence == "nnm+krum" and outcome.f == 2
        assert outcome.status == ("impossible" if impossible else "done"), outcome
        if impossible:
            assert "krum with f = 2 needs at least 2f + 3 = 7 updates, but 6 make a version" in outcome.why
    rule = {"name": "nnm", "f": 1, "rule": {"name": "krum", "f": 1}}
    attack = {"name": "backdoor", "target": 3, "share": 1}
    alone = run(PLAN.replace({"aggregator": rule, "attack": attack, "attackers.num": 1}))
    [cell] = one.of(BACKDOOR, "nnm+krum", 1)
    assert (cell.accuracy, cell.attack_success) == (alone.accuracy, alone.test["attack_success"])
    [shared, again] = [one.of(NO_ATTACK, "mean", f)[0].directory for f in (1, 2)]
    assert shared == again  # the mean does not know f: without an attack it is one run
    page = (tmp_path / "one/matrix.html").read_text()
    assert page.count("<img ") == 3 and "http-equiv" in page and "{{" not in page


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    first = run_matrix(PLAN, attacks=["alie"], defences=["mean"], f=[1], out=tmp_path)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/model.safetensors")}
    more = run_matrix(PLAN, attacks=["alie"], defences=["mean", "median"], f=[1], out=tmp_path)
    assert len(made) == 2 and len(list(tmp_path.glob("cells/*/model.safetensors"))) == 4
    assert all(path.stat().st_mtime_ns == when for path, when in made.items())
    assert set(first.outcomes) < set(more.outcomes)
    longer = run_matrix(PLAN.replace({"rounds": 4}), attacks=["alie"], defences=["mean"], f=[1], out=tmp_path)
    assert [each.rounds for each in longer.outcomes] == [4, 4]


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    attacks = ["helpers:breaks", "zero"]
    found = run_matrix(PLAN, attacks=attacks, defences=["mean"], f=[1], seeds=[0, 1], out=tmp_path)
    assert [each.status for each in found.of("helpers:breaks", "mean", 1)] == ["failed", "failed"]
    assert "ValueError: no more" in found.of("helpers:breaks", "mean", 1)[0].why
    assert [each.status for each in found.of("zero", "mean", 1)] == ["done", "done"]
    assert found.worst("mean", 1)[1::2] == ("zero", ("helpers:breaks",))
    assert "ValueError: no more" in (tmp_path / "matrix.html").read_text()


def test_the_worst_case_is_the_lowest_mean_over_seeds() -> None:
    def cell(attack: str, seed: int, accuracy: float | None) -> Outcome:
        return Outcome(attack, "mean", 1, seed, "failed" if accuracy is None else "done", accuracy)

    cells = [cell("a", 0, 0.2), cell("a", 1, 0.8), cell("b", 0, 0.4), cell("b", 1, 0.5), cell("c", 0, None)]
    matrix = Matrix(
        title="", attacks=("a", "b", "c"), targeted=frozenset(), defences=("mean",), f=(1,), seeds=(0, 1),
        outcomes=tuple(cells),
    )  # fmt: skip
    worst = matrix.worst("mean", 1)
    assert (worst.attack, worst.accuracy, worst.missing) == ("b", pytest.approx(0.45), ("c",))
    assert worst_text(matrix).splitlines()[1].split() == ["mean", "1", "–", "b", "45.0", "%", "c"]


def test_the_command_prints_the_worst_case(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    names = ["--attacks", "sign_flip", "--defences", "mean,krum", "--f", "1,2", "--seeds", "0,1"]
    said = cli("matrix", "plan.toml", *names, "--set", "rounds=2", "--out", "m", "--workers", "2", "-q")
    assert said.code == 0, said.err
    assert said.out.splitlines()[0].split()[:2] == ["defence", "f"]
    assert "impossible: krum with f = 2 against no attack, sign_flip" in said.out
    rows = list(csv.DictReader((tmp_path / "m/matrix.csv").open()))
    assert len(rows) == 16 and {row["rounds"] for row in rows if row["status"] == "done"} == {"2"}
    assert cli("matrix", "plan.toml", "--attacks", "zero", "--defences", "mean", "--f", "x").code == 2


def test_a_stopped_matrix_goes_on_to_the_same_end(processes: ForkServer, tmp_path: Path) -> None:
    """More rounds than it gets to before it is stopped, however late the test is; it goes on to fewer."""
    (tmp_path / "plan.toml").write_text(PLAN.replace({"rounds": 1_000_000}).to_toml())
    names = ["--attacks", "alie", "--defences", "mean,median", "--f", "2", "--workers", "2"]
    worker = processes.start(["matrix", "plan.toml", *names, "--out", "stopped"], tmp_path / "out.txt", tmp_path)
    until = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("stopped/cells/*/metrics.jsonl")):
        assert time.monotonic() < until and worker.code is None, worker.said
        time.sleep(0.01)
    os.killpg(worker.pid, signal.SIGINT)  # what a terminal does: all of them get it
    assert worker.wait(60) == 130 and "go on with the same command" in worker.said
    assert not list(tmp_path.glob("stopped/matrix.csv"))
    done = max(len(path.read_text().splitlines()) for path in tmp_path.glob("stopped/cells/*/metrics.jsonl"))
    plan = PLAN.replace({"rounds": done + 3})
    asked: dict[str, Any] = {"attacks": ["alie"], "defences": ["mean", "median"], "f": [2]}
    resumed = run_matrix(plan, **asked, out=tmp_path / "stopped")
    whole = run_matrix(plan, **asked, out=tmp_path / "whole")
    assert resumed == whole
    for outcome in whole.outcomes:
        pair = [tmp_path / side / outcome.directory / "model.safetensors" for side in ("stopped", "whole")]
        assert pair[0].read_bytes() == pair[1].read_bytes()
    logs = [path.read_text() for path in tmp_path.glob("stopped/cells/*/log.txt")]
    assert any("interrupted" in log for log in logs)
