"""Models of clients' own in a federation: each is made at its client, to the bits of a simulation, and stays there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.random_plans import PERSONAL
from network.federation import RUN, Federation, federation, until
from network.fork_server import ForkServer
from network.test_network_kills import NUM, begun, storm
from safetensors.torch import load_file

from atoll import Plan, run
from atoll.commit.run_state import read_state

BASE = Plan(
    rounds=4,
    partition={"name": "classes", "num_clients": NUM, "classes_per_client": 4},
    policy={"size": 2},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 16, "steps": 4},
    evaluation={"holdout": 0.3, "clients_every": 4},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "fedbn": {"model": {"name": "helpers:normed"}},
    "interpolation": {"evaluation.validation": 0.2},
}
"""What some algorithms need beside their defaults."""


SHARED = {"fedper": 592, "fedrep": 592, "lg_fedavg": 90, "fedbn": 40 + 2570, "ifca": 2 * 682}
"""How many values travel, counted by hand; of others it is the whole model."""


def message_size(algorithm: str) -> int:
    """Return the bytes of an update by docs/wire.md: header, row, four a value, and which of two clusters it is of."""
    members = 2 + (1 + len("members") + 10) + 4 * 2 if algorithm == "ifca" else 0
    return 16 + 10 + 4 * SHARED.get(algorithm, 682) + members


FAST = ("fedbn", "interpolation", "ifca")


def plan_of(algorithm: str, **changes: Any) -> Plan:
    """A short run of an algorithm."""
    return BASE.replace({**SETTINGS.get(algorithm, {}), "algorithm": algorithm, **changes})


def assert_as_simulated(network: Federation, name: str, plan: Plan) -> None:
    """A run ended with the parameters of a simulation, and its clients have the models that they have there."""
    alone = run(plan.replace({"engine": "inline"}))
    [state] = network.directory(name).glob("state-*.safetensors")
    assert torch.equal(read_state(state, plan.identity()).params_D, alone.params_D)
    if plan.evaluation.clients_every:
        told, expected = network.rows(name)[-1]["clients_test"], alone.history[-1]["clients_test"]
        assert told == pytest.approx(expected)
    assert sorted(alone.models) == list(range(NUM))
    for client, model in alone.models.items():
        path = network.root / f"c{client}" / "runs" / name / "model.safetensors"
        until(path.exists, 30, str(path))
        own, due = load_file(path), model.state_dict()
        assert own.keys() == due.keys()
        assert all(torch.equal(own[key], due[key]) for key in own), client


@pytest.fixture(scope="module")
def shared(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server and its clients, which work for one run after another."""
    with federation(tmp_path_factory.mktemp("own"), processes, certs, plan_of("fedbn")) as made:
        made.serve("--clients", str(NUM))  # plans that name code are served from a file only
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number, app="network.apps:with_own_models", once=False)
        yield made


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PERSONAL]
)
def test_clients_get_the_models_of_a_simulation(shared: Federation, algorithm: str) -> None:
    plan, name = plan_of(algorithm), RUN if algorithm == "fedbn" else algorithm.replace("_", "-")
    if name != RUN:
        shared.add(name, plan)
    assert shared.wait_for(name, 60) == "all rounds done", shared.said()
    assert_as_simulated(shared, name, plan)
    assert [row["bytes_up"] for row in shared.rows(name)] == [
        2 * message_size(algorithm) * number for number in range(1, plan.rounds + 1)
    ]
    said = f'"event": "unmeasured", "run": "{name}"' in (shared.root / "server.out").read_text()
    assert said == ("test" not in shared.rows(name)[-1]) == (algorithm in SHARED)  # which has no whole model


NOISE = {"clip": 0.5, "sigma": 1.0, "delta": 1e-3, "test_noise": True}
EVERYBODY = {"policy": {"size": NUM}, "evaluation.clients_every": 0}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "ifca-secagg": ("ifca", {"secagg": {}, **EVERYBODY}),
    "fedper-distributed": (
        "fedper",
        {"secagg": {}, "privacy": {"name": "distributed", **NOISE}, "sampler": "round_robin", **EVERYBODY},
    ),
    "apfl-central": (
        "apfl",
        {"privacy": {"name": "central", **NOISE}, "sampler": {"name": "poisson", "rate": 0.8}, **EVERYBODY},
    ),
    "ditto-codecs": (
        "ditto",
        {"uplink": [{"name": "top_k", "fraction": 0.1}], "downlink": ["delta", {"name": "quantise", "bits": 8}]},
    ),
    "fedrep-median": ("fedrep", {"aggregator": "median", "policy": {"size": NUM}}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ifca-secagg" else pytest.mark.slow) for name in BESIDE]
)
def test_own_models_go_with_other_parts(shared: Federation, name: str) -> None:
    algorithm, changes = BESIDE[name]
    plan = plan_of(algorithm, **changes)
    shared.add(name, plan)
    assert shared.wait_for(name, 60) == "all rounds done", shared.said()
    assert_as_simulated(shared, name, plan)


def test_no_algorithm_is_left_out() -> None:
    assert {"fedper", "fedbn", "ditto", "per_fedavg", "fine_tuning", "interpolation", "ifca", "local"} < set(PERSONAL)
    assert not {"fedavg", "scaffold", "fedmd"} & set(PERSONAL)


@pytest.mark.parametrize(
    "algorithm", ["apfl", pytest.param("fedrep", marks=pytest.mark.slow), pytest.param("ifca", marks=pytest.mark.slow)]
)
def test_kills_change_no_model(processes: ForkServer, certs: Path, tmp_path: Path, algorithm: str) -> None:
    """What clients remember, keep or choose survives kills of clients and of the server."""
    plan = plan_of(algorithm, rounds=7)
    with federation(tmp_path, processes, certs, plan) as network:
        begun(network)
        assert storm(network, {"server": 1, "client": 2}, plan.rounds, seed=2) == {"server": 1, "client": 2}
        network.wait(120)
        assert_as_simulated(network, RUN, plan)
