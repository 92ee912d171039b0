"""Preflight: a client tries its app against a plan that has not begun, and the operator sees who is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from network.federation import RUN, Federation, federation
from network.fork_server import ForkServer

from atoll import Plan
from atoll.cli.operator import clients_list
from atoll.core.messages import Broadcast, Task
from atoll.network.client.preflight import of_one_step
from atoll.train.build import build_job

PLAN = Plan(
    rounds=3,
    partition={"name": "iid", "num_clients": 3},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 32, "epochs": 2},
)


@pytest.mark.parametrize("algorithm", ["fedavg", "ifca"])
def test_one_step_is_tried_of_the_model_that_is_trained(algorithm: str) -> None:
    job = of_one_step(build_job(PLAN.replace({"algorithm": algorithm})))
    sent = Broadcast(job.first_D, {})
    update = job.work.open(job).train(Task(0, 0, 0), sent, {}, job.federation.client_samples(0)).update
    longest = float(update.delta_D.abs().max())
    assert 0 < longest < 0.02  # the thirty steps of a task go several times as far


def ready(network: Federation) -> list[dict[str, Any]]:
    """What the operator is told of each client."""
    return [row["ready"] for row in network.operate("GET", "/clients")["clients"]]


def test_the_operator_sees_which_sites_are_ready_and_why_others_are_not(
    tmp_path: Path, processes: ForkServer, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with federation(tmp_path / "f", processes, certs, PLAN) as network:
        network.serve("--clients", "3")
        network.enrol(4)
        (network.root / "strict.toml").write_text("max_local_steps = 1")
        apps = ["network.apps:client", "network.apps:halves", "network.site_data:with_gaps"]
        checks = [network.join(number, "--check", app=app) for number, app in enumerate(apps)]
        checks.append(network.join(3, "--check", "--floors", "strict.toml", app="network.site_data:client_0"))
        assert [check.wait(60) for check in checks] == [0, 5, 5, 5]
        said = [check.said for check in checks]
        assert "ready; the operator was told" in said[0] and "10 of 10 classes" in said[0]
        assert "a round of 30 takes about" in said[0] and "before training accuracy" in said[0]
        told = [each[RUN] for each in ready(network)]
        assert [each["ready"] for each in told] == [True, False, False, False]
        assert told[0]["seconds"] > 0
        assert "shapes: a sample has shape (1, 4, 8), one of the server's data (1, 8, 8)" in told[1]["reason"]
        assert "data: own samples: train_x: 3 NaN" in told[2]["reason"]
        assert "plan, floors: a task takes 30 steps, this client allows 1" in told[3]["reason"]
        assert all(
            f"FAILED  {each['reason'].partition(': ')[2]}" in text
            for each, text in zip(told[1:], said[1:], strict=True)
        )
        clients_list(home=network.home)
        shown = capsys.readouterr().out
        assert "law: yes" in shown and "law: shapes: a sample" in shown
        assert network.status()["round"] == 0 and network.lines() == []
        assert [row["samples"] for row in network.operate("GET", "/clients")["clients"]] == [None] * 4
        assert not list(network.root.glob("c*/runs/*"))
