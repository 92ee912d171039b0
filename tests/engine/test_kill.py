"""Runs that are stopped and killed: they end as if nothing had happened, and leave nobody behind."""

from __future__ import annotations

import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.run_farm import Farm, run_farm

from atoll import Plan, run

BASE: dict[str, Any] = {
    "partition": {"name": "dirichlet", "num_clients": 30, "alpha": 0.5},
    "policy": {"size": 4},
    "algorithm": {"name": "fedprox", "mu": 0.1},
    "local": {"steps": 3, "batch_size": 16},
    "evaluation": {"every": 7, "clients_every": 10, "max_clients": 5},
}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"name": "inline"},
    "vectorised": {"name": "vectorised", "stack": 2},
    "processes": {"name": "processes", "stack": 2, "workers": 2},
}


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with run_farm() as started:
        yield started


def plan_for(engine: str, rounds: int) -> dict[str, Any]:
    return {**BASE, "rounds": rounds, "engine": ENGINES[engine]}


def rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


def assert_same_end(path: Path, whole: Path) -> None:
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert rows(path) == rows(whole)
    for name in ("clients.json", "confusion.json", "partition.json"):
        assert (path / name).read_text() == (whole / name).read_text()


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


def kill_often(farm: Farm, plan: dict[str, Any], whole: Path, path: Path, kills: int, seed: int) -> list[int]:
    """Kill a run at random moments until it has died `kills` times, then let it end; return where it went on."""
    farm.start(plan, whole)
    spoken = farm.until("ended")
    seconds = float(next(line for line in reversed(spoken) if line.startswith("round")).split()[2])
    rng, went_on = random.Random(seed), []
    for _ in range(kills):
        pid = farm.start(plan, path)
        begun = farm.until("begin" if rng.random() < 0.9 else "started", 0.001) if False else []
        begun += [line] if (line := farm.hear(rng.uniform(0, 2.5 * seconds / kills))) else []
        while line.startswith(("begin", "round")):
            line = farm.hear(rng.uniform(0, seconds / 2 / kills))
            begun += [line] if line else []
        os.kill(pid, signal.SIGKILL)
        begun += farm.until("ended")
        assert begun[-1] == f"ended {-signal.SIGKILL}"
        went_on += [int(line.split()[1]) for line in begun if line.startswith("begin")]
    farm.start(plan, path)
    assert farm.ended() == 0
    return went_on
