"""Scripts that measure and that make tables: they are run seldom, so that what they import must not go unnoticed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.parts import Part
from atoll.data.fetch import cache_dir

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
SCRIPTS = [
    *(ROOT / "benchmarks").glob("*.py"),
    *(PEERS / name for name in ("atoll_run.py", "dp_run.py", "plain_loop.py")),
    *(ROOT / "recipes").rglob("*.py"),
    *(ROOT / "tools").glob("*.py"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_a_script_loads(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="loaded")


@pytest.mark.slow
def test_the_script_that_is_measured_beside_peers_gives_its_line() -> None:
    Part("mnist").build("data.catalog")
    options = ["--model", "logistic", "--rounds", "3", "--num-clients", "20", "--cohort", "4", "--lr", "0.1"]
    command = [sys.executable, str(PEERS / "atoll_run.py"), "--data", str(cache_dir() / "mnist"), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert len(figures["round_seconds"]) >= 2 and figures["final_accuracy"] > 0.7
