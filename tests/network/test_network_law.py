"""The law of the network: server and clients as processes of their own end with the same bits as a simulation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import rows
from network.apps import NUMBER, PLAN
from network.federation import Federation, federation, simulated, until
from network.fork_server import ForkServer

from atoll import Plan

NUM = 4
BASE = Plan(
    seed=11,
    rounds=4,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.3, "batch_size": 16},
)
PLANS: dict[str, dict[str, Any]] = {
    "fedavg-half": {"policy": {"name": "cohort", "fraction": 0.5}},
    "scaffold-half": {"algorithm": "scaffold", "policy": {"name": "cohort", "fraction": 0.5}},
    "top-k-feedback": {"uplink": [{"name": "top_k", "fraction": 0.1}]},
    "downlink-quantise": {"downlink": [{"name": "quantise", "bits": 8}]},
    "downlink-delta": {"downlink": ["delta", {"name": "quantise", "bits": 4}], "policy": {"fraction": 0.5}},
    "both-ways": {
        "algorithm": "fedadam",
        "uplink": [{"name": "top_k", "fraction": 0.2}, {"name": "quantise", "bits": 8}],
        "downlink": ["delta", {"name": "quantise", "bits": 6}],
    },
    "holdout": {"evaluation.holdout": 0.3},
    "median": {"aggregator": "median"},
    "exact-numbers-in-secret": {"algorithm": "fednova", "secagg": {}},
    "poisson": {"sampler": {"name": "poisson", "rate": 0.5}, "rounds": 6},
    "central": {
        "privacy": {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-3, "test_noise": True},
        "sampler": {"name": "poisson", "rate": 0.5},
    },
    "adapters-exact": {"algorithm": "flora", "model": {"name": "lora_mlp", "hidden": 8}},
    "adapters-of-ranks": {
        "algorithm": {"name": "fedex_lora", "ranks": [1, 2]},
        "model": {"name": "lora_mlp", "hidden": 8},
        "policy": {"name": "cohort", "fraction": 0.5},
    },
    "adapters-in-secret": {
        "algorithm": {"name": "fedit", "ranks": [1, 3]},
        "model": {"name": "lora_mlp", "hidden": 8},
        "secagg": {},
    },
    "sample-level": {"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-4, "test_noise": True}},
}
FAST = ("scaffold-half", "both-ways")


@pytest.fixture(scope="module")
def shared(processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server and its clients, which work for one run after another, or for several at once."""
    with federation(tmp_path_factory.mktemp("law"), processes, certs, BASE) as made:
        made.serve("--clients", str(NUM), plan=False)
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number, once=False)
        yield made


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_a_network_ends_with_the_bits_of_a_simulation(shared: Federation, name: str, tmp_path: Path) -> None:
    plan = BASE.replace(PLANS[name])
    shared.add(name, plan)
    assert shared.wait_for(name, 120) == "all rounds done"
    assert shared.model(name) == simulated(plan, tmp_path / "run")
    found, told = shared.audited(name), rows(tmp_path / "run")
    assert (found.rounds, found.abandoned, found.rejected) == (plan.rounds, told[-1].get("abandoned", 0), 0)
    for ours, theirs in zip(shared.rows(name), told, strict=True):
        assert {key: ours[key] for key in ("round", "test")} == {key: theirs[key] for key in ("round", "test")}
        assert ours.get("privacy") == theirs.get("privacy")
    assert len(list(shared.directory(name).glob("*state-*"))) == 1
    for agreed in shared.root.glob(f"c*/runs/{name}/info.json"):  # all who took part take the model home
        mine = agreed.parent / "model.safetensors"
        until(mine.exists, 30, str(mine))
        assert mine.read_bytes() == shared.model(name)
    if plan.privacy is not None:
        assert found.epsilon == told[-1]["privacy"]["epsilon"]


def test_several_runs_at_once_do_not_touch_each_other(shared: Federation, tmp_path: Path) -> None:
    kinds = ({"algorithm": "scaffold"}, {"algorithm": "feddyn"}, PLANS["both-ways"], PLANS["median"])
    plans = {f"beside-{number}": BASE.replace({**kind, "rounds": 3}) for number, kind in enumerate(kinds)}
    for name, plan in plans.items():
        shared.add(name, plan)
    for name, plan in plans.items():
        assert shared.wait_for(name, 120) == "all rounds done"
        assert shared.model(name) == simulated(plan, tmp_path / name)
        assert shared.audited(name).rounds == 3


@pytest.mark.parametrize("policy", ["buffered", "asynchronous"])
def test_rounds_that_overlap_run_to_their_end(shared: Federation, policy: str) -> None:
    options = {"size": 2} if policy == "buffered" else {}
    # clients that are alike: whoever answers first, the model gets better
    alike = {"partition": {"name": "iid", "num_clients": NUM}}
    plan = BASE.replace({**alike, "rounds": 12, "policy": {"name": policy, "concurrency": NUM, **options}})
    shared.add(policy, plan)
    assert shared.wait_for(policy, 120) == "all rounds done"
    found = shared.audited(policy)
    assert found.rounds == 12
    assert [len(commit["cohort"]) for commit in shared.commits(policy)] == [options.get("size", 1)] * 12
    losses = [row["test"]["loss"] for row in shared.rows(policy)]
    assert min(losses[-3:]) < losses[0] - 0.1


@pytest.mark.slow
def test_the_commands_as_people_type_them(certs: Path, tmp_path: Path) -> None:
    """No fork, no helper: the installed command, with processes that begin as everybody's do."""
    plan = BASE.replace({"partition.num_clients": 2})
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    atoll = [sys.executable, "-c", "from atoll.cli.main import main; main()"]
    here: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}

    def done(*words: str) -> str:
        return subprocess.run([*atoll, *words], **here, check=True, capture_output=True, text=True, timeout=60).stdout

    done("certs", "certs", "--host", "localhost")
    tls = ["--cert", "certs/server.pem", "--key", "certs/server.key", "--host", "localhost", "--port", "0"]
    command = [*atoll, "serve", "plan.toml", "--name", "typed", *tls, "--clients", "2", "--once"]
    with subprocess.Popen(command, **here, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[1].rstrip(",")
            for name in ("north", "south"):
                token = done("clients", "token").strip()
                done("enrol", url, "--token", token, "--name", name, "--home", name, "--ca", "certs/ca.pem")
            assert done("clients", "approve", "north", "south") == "north is client 0\nsouth is client 1\n"
            clients = []
            for number, name in enumerate(("north", "south")):
                env = {**here["env"], PLAN: "plan.toml", NUMBER: str(number)}
                join = [*atoll, "join", "--home", name, "--app", "network.apps:client", "--once"]
                clients.append(subprocess.Popen(join, cwd=tmp_path, env=env))
            assert [client.wait(60) for client in clients] == [0, 0]
            assert server.wait(60) == 0
        finally:
            for process in (server, *clients):
                process.kill()
    run = tmp_path / "atoll-server" / "runs" / "typed"
    assert (run / "model.safetensors").read_bytes() == simulated(plan, tmp_path / "alone")
    assert "4 rounds" in done("ledger", "verify", str(run))
