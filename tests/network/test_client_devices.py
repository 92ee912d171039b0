"""Clients of a federation choose where they train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from network.federation import federation, simulated
from network.fork_server import ForkServer

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.network.client.app import ClientApp


@pytest.mark.slow
def test_clients_on_a_device_end_with_the_bits_of_a_simulation(
    tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    """One client on the processor and one on a device, with memories, an uplink and evaluation at the sites."""
    plan = Plan(
        partition={"num_clients": 2},
        model={"name": "mlp_2nn", "hidden": 8},
        algorithm="scaffold",
        uplink=[{"name": "top_k", "fraction": 0.3}],
        local={"steps": 2, "batch_size": 8},
        evaluation={"clients_every": 1},
        rounds=2,
    )
    with federation(tmp_path / "f", processes, certs, plan) as network:
        network.serve("--clients", "2", "--once")
        network.enrol(2)
        network.join(0)
        network.join(1, "--device", "pretend", app="network.device_apps:client")
        network.wait(120)
        assert network.model() == simulated(plan, tmp_path / "alone")


def test_a_client_whose_device_is_not_there_is_told_before_it_joins() -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, int)
    with pytest.raises(PlanError, match=r'the app\'s device: device is "cuda:3", which torch .* set device to "auto"'):
        ClientApp(train_x=x, train_y=y, num_classes=2, device="cuda:3")
    assert ClientApp(train_x=x, train_y=y, num_classes=2, device="auto").place().device == "cpu"
