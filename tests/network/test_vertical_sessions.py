"""Vertical learning over a network is its simulation: the same bits, rows and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network.federation import Federation, federation, until
from network.fork_server import ForkServer
from network.test_same_rows import OWN, Written, without
from safetensors.torch import load
from split.parties import THREE, vertical_plan

from atoll import Plan, run
from atoll.network.protocol.exchange import transcript_name

NUM, LABELS = len(THREE), 1
BASE = vertical_plan()
DEFENCES = [{"name": "nopeek", "weight": 0.1}, {"name": "max_norm", "test_noise": True}]
PIECES = {"micro_batches": 3, "codecs": [{"name": "quantise", "bits": 8}]}
PLANS: dict[str, Plan] = {
    "plain": BASE,
    "tail": vertical_plan(split_tail="2", **{f"split_{key}": value for key, value in PIECES.items()}),
    "in-flight": vertical_plan(split_micro_batches=4, split_in_flight=2),
    "defended": vertical_plan(split_defences=DEFENCES),
    "frozen": vertical_plan(split_frozen=True, local={"steps": 3, "batch_size": 20, "lr": 0.01, "optimizer": "adam"}),
    "whole-rounds": vertical_plan(local={"epochs": 1, "batch_size": 64, "lr": 0.1}, evaluation={"every": 2}),
    "stopped": vertical_plan(rounds=9, stop={"accuracy": 0.2}),
}
FAST = ("plain", "tail")


class Sides:
    """Runs plans on a network and in simulation, each once, when first asked for."""

    def __init__(self, network: Federation, directory: Path) -> None:
        self.network, self._directory, self._known = network, directory, dict[str, tuple[Written, Written]]()

    def __call__(self, name: str) -> tuple[Written, Written]:
        """Return what network and simulation have written of a plan."""
        if name not in self._known:
            plan, alone = PLANS[name], self._directory / name
            self.network.add(name, plan)
            run(plan, out=alone, report=False)
            self.network.wait_for(name, 120)
            until((self.network.directory(name) / "result.json").exists, 30, self.network.said)
            assert self.network.model(name) == (alone / "model.safetensors").read_bytes()
            self._known[name] = Written.read(self.network.directory(name)), Written.read(alone)
        return self._known[name]


@pytest.fixture(scope="module")
def sides(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """A server and its parties, which work for one run after another, and simulations."""
    with federation(tmp_path_factory.mktemp("vertical"), processes, certs, BASE) as network:
        network.serve("--clients", str(NUM), plan=False)
        network.enrol(NUM)
        for number in range(NUM):
            network.join(number, app="network.apps:party", once=False)
        yield Sides(network, tmp_path_factory.mktemp("simulated"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_network_and_simulation_are_one(sides: Sides, name: str) -> None:
    ours, theirs = sides(name)
    assert ours.rows == theirs.rows
    assert ours.rows[-1]["cut_bytes"] > 0 and ours.rows[-1]["bytes_up"] > 0
    assert without(ours.result, "seconds") == without(theirs.result, "seconds")
    assert ours.confusion == theirs.confusion
    theirs.info["split"].pop("ledger", None)  # the key of a simulation's ledger of noise
    assert without(ours.info, *OWN) == without(theirs.info, *OWN)
    assert json.dumps(ours.info["split"]) == json.dumps(theirs.info["split"])


def test_parties_keep_their_layers_and_nothing_else(sides: Sides) -> None:
    sides("tail")
    whole = load(sides.network.model("tail"))
    own: list[dict[str, Any]] = []
    for number in range(NUM):
        path = sides.network.root / f"c{number}" / "runs" / "tail" / "model.safetensors"
        until(path.exists, 30, sides.network.said)
        own.append(load(path.read_bytes()))
        assert all(bool((whole[name] == value).all()) for name, value in own[-1].items())
    for number, mine in enumerate(own):
        assert {name.split(".")[0] for name in mine} == ({"bottoms", "top"} if number == LABELS else {"bottoms"})
        assert {name.split(".")[1] for name in mine if name.startswith("bottoms")} == {str(number)}
    assert set().union(*own) < set(whole)  # the server's layers are with nobody else


def test_the_ledger_names_what_every_party_exchanged(sides: Sides) -> None:
    sides("plain")
    found = sides.network.audited("plain")
    assert (found.rounds, found.rejected, found.ended) == (2, 0, "all rounds done")
    for commit in sides.network.commits("plain"):
        assert [each["client"] for each in commit["cohort"]] == list(range(NUM))
        for each in commit["cohort"]:
            assert transcript_name(each["session"]) == each["object"]
