"""Private runs that are killed at any moment: nothing is charged twice, forgotten, or released before it is charged."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from engine.run_farm import Farm
from helpers import rows

from atoll import Plan
from atoll.privacy.ledger import NAME, Ledger

PLAN: dict[str, Any] = {
    "partition": {"name": "iid", "num_clients": 30},
    "policy": {"size": 4},
    "local": {"steps": 2, "batch_size": 16},
    "evaluation": {"every": 7},
    "engine": {"name": "vectorised", "stack": 4},
}
CENTRAL: dict[str, Any] = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-3}
KINDS: dict[str, dict[str, Any]] = {
    "central": {"sampler": "poisson", "privacy": CENTRAL},
    "local": {"sampler": "uniform", "privacy": {**CENTRAL, "name": "local"}},
}


def private(kind: str, rounds: int, *, test_noise: bool) -> dict[str, Any]:
    plan = {**PLAN, **KINDS[kind], "rounds": rounds}
    return {**plan, "privacy": {**plan["privacy"], "test_noise": test_noise}}


def assert_same_end(path: Path, whole: Path) -> None:
    for name in ("model.safetensors", "confusion.json", NAME):
        assert (path / name).read_bytes() == (whole / name).read_bytes()
    assert rows(path) == rows(whole)


@pytest.mark.parametrize("kind", ["central", pytest.param("local", marks=pytest.mark.slow)])
def test_killed_at_every_write_in_turn(farm: Farm, tmp_path: Path, kind: str) -> None:
    """Before its first write, then before its second when it goes on, and so on; the ledger's writes are among them."""
    plan = private(kind, 4, test_noise=True)
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


def test_killed_at_random_moments_with_a_real_secret(farm: Farm, tmp_path: Path) -> None:
    """No round is published before the ledger has charged it, and each is charged once."""
    rounds, path = 12, tmp_path / "run"
    plan = private("central", rounds, test_noise=False)
    farm.start(plan, tmp_path / "timing")
    times = [float(line.split()[2]) for line in farm.until("ended") if line.startswith("round")]
    seconds = (times[-1] - times[0]) / len(times)
    rng, secrets, charged = random.Random(5), set(), [0]
    for done in sorted(rng.randrange(rounds) for _ in range(8)):
        farm.start(plan, path, die=(done, rng.uniform(0, 2 * seconds)))
        assert farm.until("ended")[-1] == f"ended {-signal.SIGALRM}"
        if not (path / "run.json").exists():
            continue  # it died before there was anything to protect
        ledger = Ledger.read(path / NAME, Plan.read(plan).identity())
        secrets.add(ledger.secret)
        charged.append(ledger.num_charged)
        published = rows(path) if (path / "metrics.jsonl").exists() else []
        assert len(published) <= ledger.num_charged <= rounds
    farm.start(plan, path)
    assert farm.ended() == 0
    assert charged == sorted(charged)
    assert charged[-1] > 0
    assert len(secrets) == 1
    lines = [json.loads(line) for line in (path / NAME).read_text().splitlines()[1:]]
    assert [line["attempt"] for line in lines] == list(range(rounds))
    assert len({line["sum"] for line in lines}) == rounds
