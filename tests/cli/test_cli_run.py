"""The command line: what it prints, what it writes, how it ends; some of it as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import run
from atoll.core.parts import Part, members
from atoll.core.plan import Plan

Shell = Callable[..., Any]

HEAVY = ("torch", "numpy", "matplotlib", "pandas", "rich.progress")

PLAN = """
name = "my first plan"
rounds = 9

[partition]
name = "dirichlet"
alpha = 0.5
num_clients = 12

[policy]
size = 6

[local]
lr = 0.05
"""

MODULE = """
from torch import nn

import atoll


def plan():
    return atoll.Plan(model=small, rounds=20, policy={"size": 3}, local={"steps": 2}, engine="inline")


def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, num_classes))
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "code",
    [
        "import atoll",
        "import atoll.cli.main",
        "import sys; sys.argv = ['atoll', '--help']; from atoll.cli.main import main; main()",
        "import sys; sys.argv = ['atoll', 'run', '--help']; from atoll.cli.main import main; main()",
        "import sys; sys.argv = ['atoll', 'run', 'nowhere.toml']; from atoll.cli.main import main; main()",
    ],
    ids=["import", "import the command line", "--help", "run --help", "a wrong plan"],
)
def test_what_needs_no_torch_does_not_wait_for_it(code: str) -> None:
    body = "\n    ".join(code.split("; "))
    script = f"import sys\ntry:\n    {body}\nexcept SystemExit:\n    pass\n"
    script += f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("loaded: []\n")


def test_help_shows_an_example_first(shell: Shell) -> None:
    alone, asked = shell(), shell("--help")
    assert asked.code == 0
    assert "atoll run --set algorithm=fedprox --rounds 30" in asked.out
    assert asked.out.index("atoll report runs/mine") < asked.out.index("Options:")
    assert "atoll run --set algorithm=fedprox --rounds 30" in alone.out + alone.err
    of_run = shell("run", "--help").out
    for option in ("--set", "--rounds", "--seed", "--engine", "--workers", "--out", "--resume", "--quiet"):
        assert option in of_run


def test_a_plan_from_toml_with_every_option(cli: Shell, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    options = ["--set", "local.lr=0.2", "--set", "algorithm=fedprox", "--set", "algorithm.mu=0.5"]
    options += ["--set", 'uplink=[{name="clip", norm=2.0}]', "--rounds", "4", "--seed", "7"]
    options += ["--engine", "processes", "--workers", "2", "--out", "somewhere/run", "--quiet"]
    said = cli("run", "plan.toml", *options)
    assert (said.code, said.err) == (0, "")
    path = tmp_path / "somewhere" / "run"
    written = Plan.from_toml((path / "plan.toml").read_text())
    assert (written.name, written.rounds, written.seed) == ("my first plan", 4, 7)
    assert written.algorithm == Part("fedprox", mu=0.5)
    assert written.uplink == (Part("clip", norm=2.0),)
    assert written.local.lr == 0.2
    assert written.engine == Part("processes", workers=2)
    found = rows(path)
    assert [row["round"] for row in found] == [1, 2, 3, 4]
    assert {row["clients"] for row in found} == {6}
    first, second, third, fourth = said.out.splitlines()
    assert first.startswith("all rounds done after 4 rounds in ")
    test = found[-1]["test"]
    assert second == (
        f"test accuracy {100 * test['accuracy']:.2f} %   loss {test['loss']:.4f}   macro F1 {test['f1']:.4f}"
    )
    assert third == "sent up 63.1 kB, down 63.0 kB"  # 4 rounds, 6 clients, 650 parameters of 4 bytes, and frames
    assert fourth == "report somewhere/run/report.html"
    assert json.loads((path / "run.json").read_text())["engine"]["name"] == "processes"
    assert (path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("engine", "part"), [("vectorised", Part("vectorised", stack=3)), ("inline", Part("inline"))])
def test_an_engine_that_the_plan_has_keeps_its_options(cli: Shell, tmp_path: Path, engine: str, part: Part) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    said = cli("run", "plan.toml", "--set", 'engine={name="vectorised", stack=3}', "--engine", engine, "--out", "run")
    assert said.code == 0
    assert Plan.from_toml((tmp_path / "run" / "plan.toml").read_text()).engine == part


@pytest.mark.parametrize(
    ("data", "figure"),
    [
        ("diabetes", "test root mean squared error"),
        ("cancer", "test accuracy"),
        ("labels", "test"),
        ("lifetimes", "test concordance index"),
    ],
)
def test_every_kind_of_problem_is_summed_up(cli: Shell, tmp_path: Path, data: str, figure: str) -> None:
    (tmp_path / "plan.toml").write_text("rounds = 1\nengine = 'inline'\n[stop]\nbytes = 100000\n")
    said = cli("run", tmp_path / "plan.toml", "--set", f"data=problem_data:{data}", "--out", tmp_path / "run")
    assert said.code == 0 and figure in said.out and " bought " in said.out and "report " in said.out


def test_a_plan_from_a_function_in_the_working_directory(shell: Shell, cli: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    said = shell("run", "mine:plan")
    assert said.code == 0
    assert said.out.endswith("report runs/digits-fedavg-1/report.html\n")
    title, *lines = said.err.splitlines()
    assert title == "fedavg · mine:small · digits · 10 clients · engine inline: 20 rounds"
    assert [line.split("  ")[0] for line in lines] == [f"round {number}/20" for number in range(2, 21, 2)]
    assert all("accuracy" in line and "clients/s" in line and "up " in line for line in lines)
    path = tmp_path / "runs" / "digits-fedavg-1"
    assert json.loads((path / "run.json").read_text())["model"] == {"name": "mine:small", "num_params": 535}
    said = cli("run", "--resume", path, "--rounds", "23", "-q")
    assert said.code == 0
    assert said.out.startswith("all rounds done after 23 rounds in ")
    assert [row["round"] for row in rows(path)] == list(range(1, 24))


def test_reports_of_several_runs_and_of_one(cli: Shell, tmp_path: Path) -> None:
    for name, algorithm in (("one", "fedavg"), ("two", "fedprox")):
        run(Plan(name=name, algorithm=algorithm, rounds=2, engine="vectorised"), out=tmp_path / name, report=False)
    said = cli("report", "one", "two", "--out", "both.html")
    assert (said.code, said.out, said.err) == (0, "both.html\n", "")
    page = (tmp_path / "both.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "fedavg" in page
    assert "fedprox" in page
    said = cli("report", "one")
    assert (said.code, said.out, said.err) == (0, "one/report.html\n", "")
    page = (tmp_path / "one" / "report.html").read_text()
    assert "fedavg" in page
    assert "fedprox" not in page


def test_clients_are_measured(cli: Shell, tmp_path: Path) -> None:
    said = cli("data", "measure", "--set", "partition=shards", "--set", "partition.num_clients=20", "--clients", "6")
    assert said.code == 0
    assert "dissimilarity B" in said.out
    assert "A noise of 10.0% needs 20 of 20 clients a round." in said.out
    assert (tmp_path / "measures.png").read_bytes()[:4] == b"\x89PNG"
    said = cli("data", "measure", "--clients", "0")
    assert said.code == 2
    assert "must be at least 1" in said.err


def test_data_are_listed_and_shown(cli: Shell, tmp_path: Path) -> None:
    said = cli("data", "list")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()] == members("data.catalog")
    assert "1,797 handwritten digits" in said.out
    said = cli("data", "show", "--set", "partition=shards", "--set", "partition.num_clients=20", "--png", "deal.png")
    assert (said.code, said.err) == (0, "")
    assert "Dataset('digits': 1437 train, 360 test, samples (1, 8, 8) uint8, 10 classes)" in said.out
    assert "20 clients by shards (num_clients 20): samples a client min 71, median 72, max 72" in said.out
    assert "Jensen-Shannon divergence (0 to 1), weighted mean 0.597" in said.out
    assert (tmp_path / "deal-samples.png").read_bytes()[:4] == b"\x89PNG"
    assert "classes a client min 2, mean 2.4, max 3 of 10" in said.out
    assert (tmp_path / "deal.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("how", "argv", "code", "says"),
    [
        ("shell", ["run", "typo.toml"], 2, "unknown key 'algoritm' in the plan: did you mean 'algorithm'?"),
        ("cli", ["run", "--resume", "nowhere"], 5, "nowhere is not a run directory"),
    ],
    ids=["plan", "run"],
)
def test_an_error_is_one_line_and_its_kind_is_the_exit_code(
    request: pytest.FixtureRequest, tmp_path: Path, how: str, argv: list[str], code: int, says: str
) -> None:
    (tmp_path / "typo.toml").write_text("algoritm = 'fedavg'")
    said = request.getfixturevalue(how)(*argv)
    assert said.code == code
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert says in said.err
    assert said.err.count("\n") == 1
