"""Clients that add their updates in secret, over a real network and through kills."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network.federation import Federation, federation, simulated
from network.fork_server import ForkServer

from atoll import Plan

NUM = 4
BASE = Plan(
    seed=7,
    rounds=3,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.2, "batch_size": 32},
    secagg={"clip": 2.0},
)
DISTRIBUTED = {"name": "distributed", "clip": 0.5, "sigma": 0.5, "delta": 1e-3, "test_noise": True}
PLANS: dict[str, dict[str, Any]] = {
    "masked": {},
    "scaffold": {"algorithm": "scaffold", "secagg.modulus_bits": 64},
    "own-noise": {"privacy": {"name": "local", "clip": 0.5, "sigma": 0.1, "delta": 1e-3, "test_noise": True}},
    "shared-noise": {"privacy": DISTRIBUTED},
    "coded-downlink": {"downlink": [{"name": "quantise", "bits": 8}], "secagg.scheme": {"server": "curious"}},
}
FAST = ("shared-noise",)


@pytest.fixture(scope="module")
def shared(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("secure"), processes, certs, BASE) as made:
        made.serve("--clients", str(NUM), plan=False)
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number, once=False)
        yield made


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_a_sum_over_the_network_is_that_of_a_simulation(shared: Federation, name: str, tmp_path: Path) -> None:
    plan = BASE.replace(PLANS[name])
    shared.add(name, plan)
    assert shared.wait_for(name, 60) == "all rounds done"
    assert shared.model(name) == simulated(plan, tmp_path / "run")
    assert shared.audited(name).rounds == 3
    assert all("object" not in entry for commit in shared.commits(name) for entry in commit["cohort"])


@pytest.mark.slow
def test_clients_that_are_killed_in_sessions_lose_nothing(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    plan, rng = BASE.replace({"rounds": 15, "algorithm": "scaffold"}), random.Random(3)
    with federation(tmp_path / "killed", processes, certs, plan) as made:
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number)
        kills = 0
        while made.status()["round"] < plan.rounds - 3:
            time.sleep(rng.uniform(0, 0.5))
            number = rng.randrange(NUM)
            assert made.clients[number].kill() == -9, made.said()
            made.join(number)
            kills += 1
        made.wait(120)
        assert made.model() == simulated(plan, tmp_path / "alone")
        found = made.audited()
        assert (found.rounds, found.abandoned) == (plan.rounds, 0) and kills > 10, kills
