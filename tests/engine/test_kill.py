"""Runs that are stopped and killed: they end as if nothing had happened, and leave nobody behind."""

from __future__ import annotations

import os
import random
import select
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.run_farm import Farm
from helpers import assert_same_end, rows
from network.fork_server import ForkServer

from atoll import Plan, run

BASE: dict[str, Any] = {
    "partition": {"name": "dirichlet", "num_clients": 30, "alpha": 0.5},
    "policy": {"size": 3},
    "algorithm": {"name": "fedprox", "mu": 0.1},
    "local": {"steps": 2, "batch_size": 16},
    "evaluation": {"every": 7, "clients_every": 10, "max_clients": 5},
}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"name": "inline"},
    "vectorised": {"name": "vectorised", "stack": 2},
    "processes": {"name": "processes", "stack": 2, "workers": 2},
}
ENDLESS = 1_000_000
"""More rounds than a run gets to before it is stopped, however late the test is; it goes on to fewer."""


def plan_for(engine: str, rounds: int) -> dict[str, Any]:
    return {**BASE, "rounds": rounds, "engine": ENGINES[engine]}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a process that is not ours."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], seconds)[0])
    finally:
        os.close(watch)


def kill_often(farm: Farm, plan: dict[str, Any], whole: Path, path: Path, kills: int) -> list[int]:
    """Kill a run again and again at random moments, then let it end; return the rounds from which it went on."""
    farm.start(plan, whole)
    times = [float(line.split()[2]) for line in farm.until("ended") if line.startswith("round")]
    seconds = (times[-1] - times[0]) / len(times)
    rng, went_on = random.Random(kills), []
    for done in sorted(rng.randrange(len(times)) for _ in range(kills)):
        farm.start(plan, path, die=(done, rng.uniform(0, 2 * seconds)))
        said = farm.until("ended")
        assert said[-1] == f"ended {-signal.SIGALRM}"
        went_on += [int(line.split()[1]) for line in said if line.startswith("begin")]
    farm.start(plan, path)
    assert farm.ended() == 0
    return went_on


@pytest.mark.parametrize(
    "engine", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("inline", "vectorised")), "processes"]
)
def test_killed_at_random_moments(farm: Farm, tmp_path: Path, engine: str) -> None:
    went_on = kill_often(farm, plan_for(engine, 30), tmp_path / "whole", tmp_path / "run", kills=8)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert max(went_on) > 0  # at least once it went on from a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_forty_times(farm: Farm, tmp_path: Path, engine: str) -> None:
    went_on = kill_often(farm, plan_for(engine, 600), tmp_path / "whole", tmp_path / "run", kills=40)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert len(set(went_on)) > 10


def test_killed_at_every_write_in_turn(farm: Farm, tmp_path: Path) -> None:
    """One run, killed before its first write, then before its second when it goes on, and so on to the end."""
    plan = plan_for("vectorised", 5)
    farm.start(plan, tmp_path / "whole")
    assert farm.ended() == 0
    deaths = 0
    farm.start(plan, tmp_path / "run", stop_at=1)
    while (code := farm.ended()) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        farm.start(plan, tmp_path / "run", stop_at=deaths + 1)
    assert deaths > 10
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("engine", ENGINES)
def test_stopped_once_at_each_write(farm: Farm, tmp_path: Path, engine: str, how: signal.Signals) -> None:
    plan = plan_for(engine, 4)
    farm.start(plan, tmp_path / "whole")
    assert farm.ended() == 0
    stops, code = 0, -1
    while code != 0:
        path = tmp_path / str(stops)
        farm.start(plan, path, stop_at=stops + 1, with_signal=how)
        code = farm.ended()
        if code:
            assert code == (130 if how is signal.SIGINT else -how)
            stops += 1
            farm.start(plan, path)
            assert farm.ended() == 0
        assert_same_end(path, tmp_path / "whole")
    assert stops > 30


def test_a_worker_that_is_killed_is_reported_and_the_run_goes_on_later(farm: Farm, tmp_path: Path) -> None:
    pid = farm.start(plan_for("processes", ENDLESS), tmp_path / "run")
    farm.until("round 9")
    victim, other = children(pid)
    os.kill(victim, signal.SIGKILL)
    said = farm.until("ended")
    assert said[-1] == "ended 5"
    assert "error a worker process died (exit code -9)" in said[-2]
    assert "--resume" in said[-2]
    assert has_ended(other, 10)
    done = len(rows(tmp_path / "run"))
    assert done >= 9
    for path in ("run", "whole"):
        farm.start(plan_for("processes", done + 5), tmp_path / path)
        assert farm.ended() == 0
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_no_worker_outlives_a_killed_run(farm: Farm, tmp_path: Path) -> None:
    """Each task would take a minute: a worker that only looked at its pipe between tasks would stay so long."""
    plan = {
        "model": {"name": "engine.run_farm:telling"},
        "local": {"steps": 100_000, "batch_size": 8},
        "engine": {"name": "processes", "workers": 2},
    }
    pid = farm.start(plan, tmp_path / "run")
    at_work: list[int] = []
    while len(at_work) < 2:
        told = int(farm.until("training")[-1].split()[1])
        at_work += [told] if told != pid and told not in at_work else []  # the run itself only rehearses
    assert sorted(at_work) == sorted(children(pid))
    os.kill(pid, signal.SIGKILL)
    assert farm.ended() == -signal.SIGKILL
    assert [has_ended(worker, 10) for worker in at_work] == [True, True]
    farm.start({**plan, "rounds": 0}, tmp_path / "run")  # the directory is free again
    assert farm.ended() == 0


# --- stopped politely -------------------------------------------------------------------------------------------------


def stopped(processes: ForkServer, path: Path, engine: str, how: Callable[[int], None]) -> tuple[int, str, str]:
    """Start `atoll run`, wait for some rounds, stop it, and return its exit code and what it said."""
    folder, metrics = path.parent, path / "metrics.jsonl"
    (folder / "plan.toml").write_text(Plan.read(plan_for(engine, ENDLESS)).to_toml())
    command = ["run", "plan.toml", "--out", path.name]
    process = processes.start(command, folder / "out.txt", folder, err=folder / "err.txt")
    while process.code is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5):
        time.sleep(0.02)
    how(process.pid)
    return process.wait(60), process.said, (folder / "err.txt").read_text()


def interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def interrupt_all(pid: int) -> None:
    """As a terminal does it."""
    os.killpg(pid, signal.SIGINT)


def terminate_all(pid: int) -> None:
    """As a scheduler does it."""
    os.killpg(pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("vectorised", interrupt),
        pytest.param("processes", interrupt_all, marks=pytest.mark.slow),
        ("processes", terminate_all),
    ],
)
def test_a_stopped_run_says_how_to_go_on_and_does(
    processes: ForkServer, tmp_path: Path, engine: str, how: Callable[[int], None]
) -> None:
    path = tmp_path / "my run"
    code, out, err = stopped(processes, path, engine, how)
    assert code == 130
    assert "Traceback" not in err
    first, _, command, _ = out.split("\n", 3)
    done = len(rows(path))
    assert first == f"stopped after round {done} of {ENDLESS}; everything is kept. Go on with:"
    assert done >= 5
    assert shlex.split(command) == ["atoll", "run", "--resume", "my run"]
    plan = Plan.from_toml((path / "plan.toml").read_text()).replace({"rounds": done + 5})
    resumed = run(plan, out=path, report=False, resume=True)
    assert resumed.reason == "all rounds done"
    run(plan, out=tmp_path / "whole", report=False)
    assert_same_end(path, tmp_path / "whole")
