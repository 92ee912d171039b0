"""Split learning over a network is its simulation: the same bits, rows and bytes, in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import rows
from laws.random_plans import split_plan
from network.federation import Federation, federation, simulated, until
from network.fork_server import ForkServer
from network.test_same_rows import OWN, Written, without
from safetensors.torch import load

from atoll import Plan, run
from atoll.core.errors import DataError, PlanError, RunError
from atoll.network.protocol.exchange import transcript_name

NUM = 3
BASE = Plan(
    seed=7,
    rounds=2,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 16, "steps": 4, "optimizer": {"name": "sgd", "momentum": 0.9}},
)
NOPEEK = {"name": "nopeek", "weight": 0.1}
PIECES = {"micro_batches": 3, "codecs": [{"name": "quantise", "bits": 8}]}
PLANS: dict[str, dict[str, Any]] = {
    "in-turn": {"split": {"cut": "2", "way": "in_turn"}},
    "v1": {"split": {"cut": "2", "way": "splitfed_v1"}},
    "v2": {"split": {"cut": "2", "way": "splitfed_v2"}},
    "in-turn-tail": {"split": {"cut": "2", "tail": "5", "way": "in_turn", **PIECES}},
    "v1-tail": {"split": {"cut": "2", "tail": "5", "way": "splitfed_v1", **PIECES}, "algorithm": "fedavgm"},
    "v2-tail": {"split": {"cut": "2", "tail": "5", "way": "splitfed_v2", "in_flight": 2, **PIECES}, "policy.size": 2},
}
PLANS |= {
    "defended": {"split": {"cut": "2", "tail": "5", "way": "splitfed_v1", "defences": [NOPEEK]}},
    "all-samples": {"local.batch_size": "all", "split": {"cut": "1", "way": "splitfed_v1", "micro_batches": 2}},
    "weighted": {"sampler": {"name": "weighted"}, "policy.size": 2, "split": {"cut": "3", "way": "splitfed_v1"}},
    "adam": {"local.optimizer": "adam", "split": {"cut": "2", "way": "in_turn", "codecs": ["half"]}},
}
OWN_MODELS: dict[str, dict[str, Any]] = {
    "batch-norm": {"model": {"name": "helpers:normalised"}, "split": {"cut": "2", "way": "splitfed_v1"}},
    "batch-norm-shared": {"model": {"name": "helpers:normalised"}, "split": {"cut": "4", "way": "splitfed_v2"}},
    "dropout": {"model": {"name": "helpers:dropped"}, "split": {"cut": "2", "way": "splitfed_v2"}},
    "blocks": {"model": {"name": "helpers:normed"}, "split": {"cut": "drop", "way": "in_turn"}},
}
"""Models that are in no catalogue, which an operator names in a file: clients bring them."""
DRAWN = [seed for seed in range(100) if ":" not in split_plan(seed)["model"]["name"]][:20]
FAST = ("in-turn", "v1-tail", "v2-tail")


class Sides:
    """Runs plans on a network and in simulation, each once, when first asked for."""

    def __init__(self, network: Federation, directory: Path) -> None:
        self.network, self._directory, self._known = network, directory, dict[str, tuple[Written, Written]]()

    def __call__(self, name: str) -> tuple[Written, Written]:
        """Return what network and simulation have written of a plan."""
        if name not in self._known:
            plan, alone = BASE.replace(PLANS[name]), self._directory / name
            self.network.add(name, plan)
            run(plan.replace({"engine": "inline"}), out=alone, report=False)
            assert self.network.wait_for(name, 120) == "all rounds done", self.network.said()
            until((self.network.directory(name) / "result.json").exists, 30, name)
            assert self.network.model(name) == (alone / "model.safetensors").read_bytes()
            self._known[name] = Written.read(self.network.directory(name)), Written.read(alone)
        return self._known[name]


@pytest.fixture(scope="module")
def sides(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """A server and its clients, which work for one run after another, and simulations."""
    with federation(tmp_path_factory.mktemp("split"), processes, certs, BASE) as network:
        network.serve("--clients", str(NUM), plan=False)
        network.enrol(NUM)
        for number in range(NUM):
            network.join(number, app="network.apps:split", once=False)
        yield Sides(network, tmp_path_factory.mktemp("simulated"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_network_and_simulation_are_one(sides: Sides, name: str) -> None:
    ours, theirs = sides(name)
    assert ours.rows == theirs.rows
    assert ours.rows[-1]["cut_bytes"] > 0 and ours.rows[-1]["bytes_up"] > 0
    assert without(ours.result, "seconds") == without(theirs.result, "seconds")
    assert ours.confusion == theirs.confusion
    assert without(ours.info, *OWN) == without(theirs.info, *OWN)
    assert json.dumps(ours.info["split"]) == json.dumps(theirs.info["split"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_MODELS)
def test_models_of_clients_own_are_cut_alike(processes: ForkServer, certs: Path, tmp_path: Path, name: str) -> None:
    plan = BASE.replace(OWN_MODELS[name])
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number, app="network.apps:split")
        made.wait(120)
        assert made.model() == simulated(plan, tmp_path / "alone")
        for mine, theirs in zip(made.rows(), rows(tmp_path / "alone"), strict=True):
            assert without(mine, "seconds", "round_seconds") == without(theirs, "seconds", "round_seconds")


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_a_drawn_plan_is_refused_or_ends_as_its_simulation(sides: Sides, seed: int, tmp_path: Path) -> None:
    settings = split_plan(seed)
    links = {"split.latency": None, "split.bandwidth": None, "split.handover": "server"}
    clients = {
        "seed": BASE.seed,
        "partition": BASE.partition,
        "policy": {"name": "cohort", "size": 2},
        "engine": "inline",
    }
    name = f"drawn-{seed}"
    try:
        plan = Plan(**settings).replace({**links, **clients})
        alone = run(plan)
    except (PlanError, DataError):
        return  # with a reason, as the law of composition sees to
    try:
        sides.network.add(name, plan)
    except RunError as refusal:
        assert re.search(r"\b(use|leave|set|choose)\b", str(refusal)), refusal
        return
    assert sides.network.wait_for(name, 120) == "all rounds done", sides.network.said()
    until((sides.network.directory(name) / "result.json").exists, 30, name)
    ours = sides.network.rows(name)
    for mine, theirs in zip(ours, alone.history, strict=True):
        for key in ("test", "train_loss", "bytes_up", "bytes_down", "messages", "round_trips", "cut_bytes", "clients"):
            assert mine.get(key) == theirs.get(key), (key, plan.to_toml())


def test_clients_keep_their_layers_and_nothing_else(sides: Sides) -> None:
    sides("v1-tail")
    whole = load(sides.network.model("v1-tail"))
    for number in range(NUM):
        path = sides.network.root / f"c{number}" / "runs" / "v1-tail" / "model.safetensors"
        until(path.exists, 30, str(path))
        mine = load(path.read_bytes())
        assert set(mine) == {"1.weight", "1.bias", "5.weight", "5.bias"} < set(whole)
        assert all(bool((whole[name] == value).all()) for name, value in mine.items())
    found = sides.network.audited("v1-tail")
    assert (found.rounds, found.rejected) == (2, 0)
    for commit in sides.network.commits("v1-tail"):
        for each in commit["cohort"]:
            assert transcript_name(each["session"]) == each["object"]
    total = sum(each["session"]["up"][1] for commit in sides.network.commits("v1-tail") for each in commit["cohort"])
    assert total == sides.network.rows("v1-tail")[-1]["bytes_up"]
