"""Problems other than classes run between organisations to the bits of their simulation; clients need not name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from network.federation import federation, simulated
from network.fork_server import ForkServer

from atoll import Plan

PROBLEMS: dict[str, dict[str, Any]] = {
    "diabetes": {"secagg": {}},
    "cancer": {"uplink": [{"name": "top_k", "fraction": 0.5}]},
    "labels": {"model": {"name": "mlp_2nn", "hidden": 8}},
    "sequences": {"model": {"name": "char_lstm", "hidden": 6, "layers": 1}},
    "lifetimes": {"local": {"steps": 3, "batch_size": "all", "lr": 0.05}},
}


FAST = ("diabetes", "sequences")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in PROBLEMS]
)
def test_a_federation_ends_as_its_simulation(name: str, tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    base = Plan(
        data=f"problem_data:{name}",
        partition={"num_clients": 3},
        local={"lr": 0.05, "batch_size": 16},
        rounds=3,
    )
    plan = base.replace(PROBLEMS[name])
    with federation(tmp_path / "f", processes, certs, plan) as network:
        network.run_to_end(3)
        assert network.model() == simulated(plan, tmp_path / "alone")
        assert "loss" in network.rows()[-1]["test"] and len(network.rows()[-1]["test"]) > 1
