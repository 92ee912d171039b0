"""The comparison of two commits tells a slower one from noise."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "before_after.py"
WORK = "network round"
"""The work that needs no download."""
SLOW = """

import time

quick = mean


def mean() -> Aggregator:
    rule = quick()

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        time.sleep(0.2)
        return rule.finish(acc, memory)

    return rule._replace(finish=finish)
"""
"""What makes the mean slow."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("before_after", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ratios", "low", "high", "slower"),
    [
        ([1.10, 1.05, 1.06, 1.04, 1.20, 1.05, 0.90], 1.04, 1.10, True),  # one turn may be the other way
        ([1.10, 1.05, 1.06, 1.04, 1.20, 0.99, 0.90], 0.99, 1.10, False),  # two are noise
        ([1.02, 1.02, 1.02, 1.02, 1.02, 1.02, 1.02], 1.02, 1.02, False),  # surely slower, by less than matters
        ([1.04, 1.05, 1.06, 1.07], 1.04, 1.07, True),
        ([0.99, 1.05, 1.06, 1.07], 0.99, 1.07, False),
    ],
)
def test_a_ratio_is_judged_by_its_median_and_its_spread(
    script: ModuleType, ratios: list[float], low: float, high: float, slower: bool
) -> None:
    found = script.Ratio.of(ratios)
    assert (found.low, found.high, found.slower) == (low, high, slower)


def test_too_few_turns_and_unknown_works_are_refused() -> None:
    for options, why in ((["--turns", "3"], "at least 4"), (["--only", "nothing"], "no work")):
        done = subprocess.run([sys.executable, SCRIPT, ".", ".", *options], capture_output=True, text=True)
        assert done.returncode == 2 and why in done.stderr


@pytest.mark.slow
def test_a_slower_commit_is_found(tmp_path: Path) -> None:
    """The server sleeps for 0.2 s in each of its commits; the other side is as it was."""
    shutil.copytree(SCRIPT.parents[1] / "src", tmp_path / "src")
    rule = tmp_path / "src" / "atoll" / "aggregators" / "mean.py"
    with rule.open("a") as file:
        file.write(SLOW)
    command = [sys.executable, SCRIPT, SCRIPT.parents[1], tmp_path, "--turns", "4", "--only", WORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| slower |" in done.stdout
