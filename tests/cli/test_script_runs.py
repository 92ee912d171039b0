"""Runs that a script or a notebook began: they write what the command line needs, and show how far they are."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_end
from torch import nn

import atoll
from atoll.core.errors import RunError
from atoll.engine.base import COMPILING
from atoll.report.progress import Bar, Steps

Shell = Callable[..., Any]

PARTS = """
from torch import nn

def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
WATCHING = """
from atoll.events import RoundCommitted

def stop_after_three(event):
    if isinstance(event, RoundCommitted) and event.row["round"] == 3:
        raise KeyboardInterrupt
"""
SCRIPT = (
    PARTS
    + WATCHING
    + """
import sys
import atoll

plan = atoll.Plan(model=small, rounds=5, policy={"size": 3}, engine="inline", evaluation={"clients_every": 1})
resume = "resume" in sys.argv
print((atoll.resume("run", plan) if resume else atoll.run(plan, out="run", watch=[stop_after_three])).reason)
"""
)


def plan_of(model: Any) -> atoll.Plan:
    return atoll.Plan(model=model, rounds=5, policy={"size": 3}, engine="inline", evaluation={"clients_every": 1})


def small(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def test_a_run_from_python_goes_on_from_the_command_line(cli: Shell, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    names: dict[str, Any] = {}
    exec(WATCHING, names)
    stopped = atoll.run(plan_of("parts:small"), out=tmp_path / "run", watch=[names["stop_after_three"]])
    assert stopped.reason == "interrupted" and len(stopped.history) == 3
    said = cli("run", "--resume", "run", "-q")
    assert said.code == 0 and said.out.startswith("all rounds done after 5 rounds"), said.err
    atoll.run(plan_of(small), out=tmp_path / "whole", report=False)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_function_of_a_script_is_asked_for(
    cli: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mine.py", *argv])
        runpy.run_path("mine.py", run_name="__main__")
        return capsys.readouterr().out.strip()

    (tmp_path / "mine.py").write_text(SCRIPT)
    assert script() == "interrupted"
    said = cli("run", "--resume", "run", "-q")
    assert said.code != 0
    assert said.err.startswith(
        "error: the model of run is __main__:small, a function of the script that began this run"
    )
    assert "atoll.resume('run', plan)" in said.err and 'model = "module:function"' in said.err
    assert script("resume") == "all rounds done"
    atoll.run(plan_of(small), out=tmp_path / "whole", report=False)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_resume_needs_no_plan_where_all_is_written(tmp_path: Path) -> None:
    plan = atoll.Plan(rounds=2, policy={"size": 2}, engine="inline")
    atoll.run(plan, out=tmp_path / "run", report=False)
    longer = atoll.resume(tmp_path / "run", plan.replace({"rounds": 4}))
    assert torch.equal(atoll.resume(tmp_path / "run").params_D, longer.params_D) and len(longer.history) == 4
    with pytest.raises(RunError, match="is not a run directory"):
        atoll.resume(tmp_path / "nowhere")


def test_a_run_with_a_directory_writes_its_report(tmp_path: Path) -> None:
    plan = atoll.Plan(rounds=2, policy={"size": 2}, engine="inline")
    atoll.run(plan, out=tmp_path / "run")
    assert "all rounds done" in (tmp_path / "run" / "report.html").read_text()
    atoll.run(plan, out=tmp_path / "other", report=False)
    assert not (tmp_path / "other" / "report.html").exists()


def test_a_notebook_shows_pictures(tmp_path: Path) -> None:
    plan = atoll.Plan(rounds=2, policy={"size": 2}, engine="inline")
    result = atoll.run(plan, out=tmp_path / "run", report=False)
    assert result.plot()._repr_png_().startswith(b"\x89PNG")
    shown = result._repr_html_()
    assert "all rounds done after 2 of 2 rounds" in shown and '<img alt="accuracy' in shown and "base64,iVBOR" in shown
    assert (
        repr(result).startswith("<Result: all rounds done after 2 of 2 rounds; accuracy ") and len(repr(result)) < 300
    )
    none = atoll.run(atoll.Plan(rounds=0, engine="inline"))
    assert none._repr_html_() == "<p>all rounds done after 0 of 0 rounds</p>"


def test_version(cli: Shell) -> None:
    said = cli("--version")
    assert said.code == 0 and re.fullmatch(r"atoll \d+\.\d+\.\d+\n", said.out)


def test_the_title_tells_workers_and_stacks_apart(cli: Shell) -> None:
    options = ["--rounds", "1", "--set", "policy.size=10", "--out", "run"]
    said = cli("run", *options, "--set", 'engine={name="processes", workers=2, stack=5}')
    assert "engine processes, 2 workers, 5 clients trained as one: 1 rounds" in said.err.splitlines()[0]


def test_a_pipe_gets_a_line_of_every_tenth_and_whenever_it_was_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"seconds": 1.0, "round_seconds": 1.0, "clients": 2}
    monkeypatch.setattr(Bar, "SECONDS", 1e9)  # however slow this machine is
    bar = Bar()
    bar(atoll.events.SetupStep(text="compiling"))
    bar(atoll.events.RunStarted(title="a plan", version=0, rounds=100))
    for number in range(1, 21):
        bar(atoll.events.ClientReported(num_done=1, num_expected=2))
        bar(atoll.events.RoundCommitted(row={**row, "round": number}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["compiling", "a plan: 100 rounds"]
    assert [line.split()[1] for line in lines[2:]] == ["10/100", "20/100"]
    monkeypatch.setattr(Bar, "SECONDS", 0.0)  # as if each took longer than a reader waits
    bar(atoll.events.ClientReported(num_done=1, num_expected=2))
    bar(atoll.events.RoundCommitted(row={**row, "round": 21}))
    assert [line.split("  ")[:2] for line in capsys.readouterr().err.splitlines()] == [
        ["round 21/100", "1 of 2 clients"],
        ["round 21/100", "2 clients/s"],
    ]


def test_long_work_says_which_step_it_is_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steps, "SECONDS", 1e9)
    with Steps() as steps:
        for what in ("gradients", "minima"):
            for done in range(1, 4):
                steps(what, done, 3)
        monkeypatch.setattr(Steps, "SECONDS", 0.0)
        steps("minima", 3, 3)
    assert capsys.readouterr().err.splitlines() == ["gradients: 1 of 3", "minima: 1 of 3", "minima: 3 of 3"]


def test_measuring_is_not_silent_on_a_pipe(cli: Shell) -> None:
    said = cli("data", "measure", "--clients", "2", "--budget", "2")
    assert said.code == 0
    steps = list(dict.fromkeys(line.partition(":")[0] for line in said.err.splitlines()))
    assert steps[:3] == ["curvature", "gradients", "steps to the minimum of all samples"] and steps[-1] == "drift"


def test_compiling_is_told_before_the_first_round() -> None:
    heard: list[atoll.events.Event] = []
    engine = {"name": "vectorised", "stack": 2, "compile": True}
    atoll.run(atoll.Plan(rounds=0, engine=engine), watch=[heard.append])
    assert heard[0] == atoll.events.SetupStep(text=COMPILING)
    assert [type(event).__name__ for event in heard[1:]] == ["RunStarted", "RunEnded"]
