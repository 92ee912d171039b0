"""What a network writes of a run is what a simulation of the same plan writes: metrics, result and confusion matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import rows
from network.federation import Federation, federation, until
from network.fork_server import ForkServer

from atoll import Plan, run

NUM = 4
BASE = Plan(
    seed=11,
    rounds=3,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.3, "batch_size": 16},
)
HALF = {"policy": {"name": "cohort", "fraction": 0.5}}
POISSON = {"sampler": {"name": "poisson", "rate": 0.5}}
NOISE = {"clip": 0.5, "sigma": 1.0, "delta": 1e-3, "test_noise": True}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"evaluation.every": 2, "rounds": 5},
    "codecs": {
        "algorithm": "fedadam",
        "uplink": [{"name": "top_k", "fraction": 0.2}, {"name": "quantise", "bits": 8}],
        "downlink": ["delta", {"name": "quantise", "bits": 6}],
    },
    "extras": {"algorithm": "fednova", "uplink": ["eden"], **HALF, "sampler": "importance", "rounds": 4},
    "detection": {
        "aggregator": {"name": "trimmed_mean", "f": 1},
        "detection": {"name": "cosine", "threshold": 0.9},
    },
    "contribution": {"algorithm": "scaffold", "contribution": "shapley", "server.samples": 50},
    "trust": {"aggregator": "fltrust", "server.samples": 50, "evaluation.holdout": 0.3},
    "bytes": {"stop.bytes": 50_000, "rounds": 10},
    "bytes-between": {"stop.bytes": 60_000, "rounds": 10},
    "accuracy": {"stop.accuracy": 0.45, "rounds": 10},
    "samples": {"stop.samples": 4000, "rounds": 10, "evaluation.every": 0},
    "abandoned": {**POISSON, "rounds": 6},
    "private": {"privacy": {"name": "central", "epsilon": 5.0, **NOISE}, **POISSON, "rounds": 30},
    "secure": {"secagg": {}, "rounds": 2},
    "buffered": {"policy": {"name": "buffered", "size": 1, "concurrency": 1}},
}
REASONS = {
    "bytes": "byte budget spent",
    "bytes-between": "byte budget spent",
    "accuracy": "target reached",
    "samples": "compute budget spent",
    "private": "privacy budget spent",
}
"""Why runs end that do not end with their last round."""
OWN = ("engine", "name", "setup_seconds", "started", "privacy")
"""What run.json says of a run alone: its driver, its name, its times, and the key of its privacy ledger."""


class Written(NamedTuple):
    """What a run has written."""

    rows: list[dict[str, Any]]
    result: dict[str, Any]
    confusion: dict[str, Any]
    info: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Written:
        """Read a directory of a run that is over."""
        files = [json.loads((directory / f"{name}.json").read_text()) for name in ("result", "confusion", "run")]
        return cls(rows(directory), *files)


HOLDS: dict[str, Callable[[Written], bool]] = {
    "plain": lambda written: ["test" in row for row in written.rows] == [False, True, False, True, True],
    "detection": lambda written: bool(written.result["detection"]["quarantined"]) and written.rows[-1]["clients"] < NUM,
    "contribution": lambda written: len(written.result["contribution"]) == NUM,
    "abandoned": lambda written: written.rows[-1]["abandoned"] > 0,
    "private": lambda written: 0 < written.rows[-1]["privacy"]["epsilon"] <= 5.0 and len(written.rows) < 30,
    "secure": lambda written: "secagg" in written.rows[-1],
    "buffered": lambda written: "staleness" in written.rows[-1],
}
"""What shows that a plan does what it is here for: rows that hold nothing of it would be equal, whatever it does."""


class Sides:
    """Runs plans on a network and in simulation, each once, when first asked for."""

    def __init__(self, network: Federation, directory: Path) -> None:
        self._network, self._directory, self._known = network, directory, dict[str, tuple[Written, Written]]()

    def __call__(self, name: str) -> tuple[Written, Written]:
        """Return what network and simulation have written of a plan."""
        if name not in self._known:
            network, plan, alone = self._network, BASE.replace(PLANS[name]), self._directory / name
            network.add(name, plan)
            run(plan.replace({"engine": "inline"}), out=alone, report=False)
            assert network.wait_for(name, 120) == REASONS.get(name, "all rounds done")
            until((network.directory(name) / "result.json").exists, 30, name)
            self._known[name] = Written.read(network.directory(name)), Written.read(alone)
        return self._known[name]


@pytest.fixture(scope="module")
def sides(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """A server and its clients, which work for one run after another, and simulations."""
    with federation(tmp_path_factory.mktemp("rows"), processes, certs, BASE) as network:
        network.serve("--clients", str(NUM), plan=False)
        network.enrol(NUM)
        for number in range(NUM):
            network.join(number, once=False)
        yield Sides(network, tmp_path_factory.mktemp("simulated"))


def without(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in names}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (place % 2)) for place, name in enumerate(PLANS)]
)
def test_network_and_simulation_write_the_same(sides: Sides, name: str) -> None:
    ours, theirs = sides(name)
    assert name not in HOLDS or HOLDS[name](theirs)
    assert ours.rows == theirs.rows
    assert without(ours.result, "seconds") == without(theirs.result, "seconds")
    assert ours.result.keys() == theirs.result.keys()
    assert ours.confusion == theirs.confusion
    assert without(ours.info, *OWN) == without(theirs.info, *OWN)
    assert ours.info.keys() == theirs.info.keys()
