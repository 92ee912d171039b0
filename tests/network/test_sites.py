"""Evaluation at the sites: clients measure versions on their own samples, and the server adds up what they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network.federation import Federation, federation
from network.fork_server import ForkServer

from atoll import Plan
from atoll.commit.run_state import read_state
from atoll.core.messages import State
from atoll.train.build import build_job
from atoll.train.federation import build_federation
from atoll.train.metrics import Measures, spread
from atoll.train.trainer import Trainer

NUM = 3
BASE = Plan(
    rounds=3,
    partition={"name": "iid", "num_clients": NUM},
    local={"lr": 0.1, "batch_size": 32},
    evaluation={"every": 0, "clients_every": 2, "holdout": 0.4},
)
PROBLEMS: dict[str, dict[str, Any]] = {
    "classification": {"model": {"name": "mlp_2nn", "hidden": 8}},
    "regression": {"data": {"name": "network.site_data:numbers", "tests": 0}},
    "binary": {"data": "network.site_data:yes_or_no", "evaluation.metrics": ["auroc", "accuracy"]},
}


def run_to_end(network: Federation, *options: str, app: str = "network.site_data:client") -> None:
    """Let all clients take part until the run is over."""
    network.serve("--clients", str(NUM), "--once", *options)
    network.enrol(NUM)
    for number in range(NUM):
        network.join(number, app=app)
    network.wait(60.0)


def sites_of(network: Federation) -> dict[str, Any]:
    """What clients measured of the last version."""
    found: dict[str, Any] = json.loads((network.directory() / "sites.json").read_text())
    return found


def parts_at_home(plan: Plan, params_D: torch.Tensor) -> tuple[Measures, list[State]]:
    """What a simulation's clients measure of a model."""
    plan = plan.replace({"data.tests": 30} if "tests" in plan.data.options else {})
    trainer = Trainer(build_job(plan, build_federation(plan)))
    return trainer.job.measures, [trainer.measure_client(params_D, client, {}) for client in range(NUM)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sites_give_the_figures_of_a_simulation(
    problem: str, tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    plan = BASE.replace(PROBLEMS[problem])
    with federation(tmp_path / "f", processes, certs, plan) as network:
        run_to_end(network)
        [state] = network.directory().glob("state-*.safetensors")
        measures, parts = parts_at_home(plan, read_state(state, plan.identity()).params_D)
        sites = sites_of(network)
        pooled = measures.finish(measures.merge(parts))
        assert sites["round"] == plan.rounds
        assert [site["samples"] for site in sites["sites"]] == [int(part["count"]) for part in parts]
        for name, value in pooled.items():
            error = sites["pooled"].get(f"{name}_error", 0.0)
            assert sites["pooled"][name] == pytest.approx(value, abs=error + 1e-9)
        alone = [measures.finish_sums(measures.condense(part)) for part in parts]
        assert [site["figures"] for site in sites["sites"]] == [pytest.approx(each) for each in alone]
        main = next(iter(pooled))
        main_C, loss_C = np.array([(each[main], each["loss"]) for each in alone]).T
        expected = spread(main_C, loss_C, larger_is_better=measures.larger_is_better)
        rows = network.rows()
        assert [row["round"] for row in rows if "clients_test" in row] == [2, 3]
        assert rows[-1]["clients_test"] == pytest.approx(expected)
        worst = (min if measures.larger_is_better else max)(range(NUM), key=lambda place: main_C[place])
        assert sites["worst"]["client"] == worst
        assert network.audited().ended
