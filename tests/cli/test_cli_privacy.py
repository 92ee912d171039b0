"""`atoll privacy`, and what `atoll run` and the report say of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

PLAN = """
rounds = 12
sampler = "poisson"
engine = "inline"
partition = {name = "iid", num_clients = 60}
policy = {size = 12}
local = {steps = 1}
privacy = {name = "central", clip = 1.0, sigma = 1.0, delta = 1e-4, epsilon = 5.0}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "private.toml"
    path.write_text(PLAN)
    return path


def test_plan_confirms_the_sigma_of_calibrate(cli: Any, plan: Path, tmp_path: Path) -> None:
    said = cli("privacy", "calibrate", plan, "--epsilon", "5")
    assert said.code == 0
    sigma = float(re.search(r"privacy\.sigma=([\d.]+)", said.out)[1])  # type: ignore[index]
    png = tmp_path / "price.png"
    shown = cli("privacy", "plan", plan, "--set", f"privacy.sigma={sigma}", "--png", png)
    assert shown.code == 0
    last = next(line.split() for line in shown.out.splitlines() if line.split()[:1] == ["12"])
    assert 4.99 < float(last[1]) <= 5.0 <= float(last[2])
    assert "one client with all its samples, or nobody in its place" in shown.out
    assert "ends the run" not in shown.out
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_run_prints_epsilon_and_the_report_states_it(cli: Any, plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = cli("run", plan, "--rounds", "30", "--out", out, "--set", "privacy.test_noise=true")
    assert said.code == 0
    assert re.search(r"privacy budget spent after \d+ rounds", said.out)
    assert "epsilon 4." in said.out
    assert "NOT PRIVATE: noise from the plan's seed" in said.out
    assert "epsilon" in said.err
    page = (out / "report.html").read_text()
    for text in (
        "Epsilon spent",
        "one client with all its samples, or nobody in its place",
        "NOT PRIVATE",
        "alt=&quot;Privacy",
        "budget: epsilon 5",
    ):
        assert text in page or text.replace("&quot;", '"') in page
    shown = cli("privacy", "plan", plan, out, "--set", "rounds=30", "--png", tmp_path / "price.png")
    assert shown.code == 0
    done = int(re.search(r"spent after (\d+) rounds", said.out)[1])  # type: ignore[index]
    assert f"ends the run after round {done}" in shown.out


def test_audit_passes_and_fails(cli: Any, plan: Path) -> None:
    said = cli("privacy", "audit", plan)
    assert said.code == 0
    assert int(re.search(r"noise below (\d+) % of the claimed would be detected", said.out)[1]) >= 50  # type: ignore[index]
    spends = re.search(r"spend epsilon ([\d.]+) at least, claimed are ([\d.]+) at most", said.out)
    assert 0 < float(spends[1]) < float(spends[2])  # type: ignore[index]
    few = cli("privacy", "audit", plan, "--canaries", "5", "--set", "privacy.sigma=4.0")
    assert few.code == 0
    assert "half the claimed size would NOT be detected" in few.out
    bad = "privacy={name='privacy.breaking:no_noise', clip=1.0, sigma=1.0, delta=1e-4}"
    broken = cli("privacy", "audit", plan, "--set", bad)
    assert broken.code == 5
    assert "gives away more than it claims" in broken.err


@pytest.mark.parametrize("command", ["calibrate", "plan", "audit"])
def test_a_plan_without_privacy_is_refused_with_the_way_out(cli: Any, command: str) -> None:
    more = ("--epsilon", "1") if command == "calibrate" else ()
    said = cli("privacy", command, *more)
    assert said.code == 2
    assert "the plan has no privacy" in said.err
    advice = shlex.split(said.err.partition("e.g. with ")[2])
    assert cli("privacy", command, *more, *advice).code == 0  # one that works as it stands
