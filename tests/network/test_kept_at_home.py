"""Parameters that clients keep, in a federation: each has its own at home, and the server never holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from network.federation import RUN, federation, simulated
from network.fork_server import ForkServer
from safetensors.torch import load_file

from atoll import Plan
from atoll.commit.run_state import read_state
from atoll.core.messages import KEPT
from atoll.network.client.home import RunHome

NUM = 3
PLAN = Plan(
    rounds=4,
    partition={"name": "classes", "num_clients": NUM, "classes_per_client": 4},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 16},
    keep=["5.*"],
)


@pytest.mark.parametrize(
    "change",
    [{"secagg": {}}, *(pytest.param(change, marks=pytest.mark.slow) for change in ({}, {"algorithm": "scaffold"}))],
    ids=str,
)
def test_clients_keep_what_a_simulation_gives_them(
    change: dict[str, object], tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    plan = PLAN.replace(change)
    with federation(tmp_path / "f", processes, certs, plan) as network:
        network.run_to_end(NUM)
        simulated(plan, tmp_path / "alone")
        expected = read_state(tmp_path / "alone" / "checkpoint.safetensors", plan.identity())
        saved = load_file(network.directory() / "model.safetensors")
        personal = load_file(tmp_path / "alone" / "model.safetensors")
        result = json.loads((network.directory() / "result.json").read_text())
        assert not [name for name in saved if name.startswith("5.")]
        for client, memory in expected.clients.items():
            _, state = RunHome(network.root / f"c{client}" / "runs" / RUN).state()
            assert torch.equal(state[KEPT], memory[KEPT])
            own = load_file(network.root / f"c{client}" / "runs" / RUN / "model.safetensors")
            assert own.keys() == saved.keys() | {"5.weight", "5.bias"}
            assert all(torch.equal(own[name], personal[f"client.{client}.{name}"]) for name in own)
        assert result["test"] is None
