"""A server that plants a model which makes samples leak, and which check of a client refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network.test_client_agreement import One, X, Y

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Payload
from atoll.core.plan import Plan
from atoll.core.probe import Samples, Work
from atoll.core.wire import pack
from atoll.data.dataset import Dataset
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import Ref
from atoll.probes.trap_weights import trap_weights
from atoll.simulation.seat import watch

PLAN = Plan(model={"name": "mlp_2nn", "hidden": 64}, local={"steps": 1, "batch_size": "all", "lr": 0.1}, rounds=9)


class Planting(One):
    """A server whose run begins with the model of the plan's own seed, or with a planted one."""

    def __init__(self, path: Path, *, planted: bool, max_change: float | None = 1.0) -> None:
        super().__init__(path, PLAN, Floors(max_change=max_change))
        self.honest = self.work.layout.params_D.clone()
        self.planted = self.trap()
        self.__dict__["ones"] = self.planted if planted else self.honest  # what runs begin with

    def trap(self) -> torch.Tensor:
        """The model that the probe plants, by samples of the same kind that the server made up."""
        data = Dataset(name="x", train_x=X, train_y=Y, test_x=X, test_y=Y, num_classes=2)
        known = watch(PLAN.replace({"data": data, "partition": {"name": "iid", "num_clients": 4}}), 1).known
        known = known._replace(elsewhere=Samples(torch.rand(200, 5), torch.zeros(200, dtype=torch.long)))
        probe = trap_weights()
        assert probe.why_not(known, []) is None and probe.plant is not None
        return probe.plant(known, self.honest, Work(np.random.default_rng(0), lambda: False))

    def put(self, params_D: torch.Tensor) -> Ref:
        return self.server.put(pack(Payload(params_D)))

    def ask(self, attempt: int, params_D: torch.Tensor, **changes: Any) -> None:
        """Write a version into the ledger, if it is not the first, and ask for an update of it."""
        if attempt:
            self.server.commit("run", params_D)
        self.__dict__["ones"] = params_D
        self.order(attempt, attempt, model=self.put(params_D), **changes)


def test_a_planted_first_model_is_refused_though_the_ledger_names_it(tmp_path: Path) -> None:
    one = Planting(tmp_path, planted=True)
    with one.joined() as client:
        one.ask(0, one.planted)
        client.step()
    [reason] = one.reasons()
    assert "away from the first model of the plan's own seed" in reason and "floors.max_change" in reason
    assert not one.server.deliveries


def test_without_the_floor_a_planted_model_in_the_ledger_is_trained_on(tmp_path: Path) -> None:
    one = Planting(tmp_path, planted=True, max_change=None)
    with one.joined() as client:
        one.ask(0, one.planted)
        client.step()
    assert len(one.server.deliveries) == 1 and not one.reasons()


def test_a_model_planted_for_one_client_is_refused_by_the_ledger_alone(tmp_path: Path) -> None:
    one = Planting(tmp_path, planted=False, max_change=None)
    with one.joined() as client:
        one.order(model=one.put(one.planted))  # its ledger says that it sent the planted one as version 0
        with pytest.raises(RunError, match="other parameters than its ledger names"):
            client.step()
    assert not one.server.deliveries


def test_a_model_planted_later_is_refused_after_honest_versions(tmp_path: Path) -> None:
    one = Planting(tmp_path, planted=False)
    with one.joined() as client:
        one.ask(0, one.honest)
        client.step()
        moved = one.honest + 0.5 / one.honest.numel() ** 0.5
        one.ask(1, moved)
        client.step()
        assert len(one.server.deliveries) == 2 and not one.reasons()
        one.ask(2, one.planted)
        client.step()
    [reason] = one.reasons()
    assert "away from version 1, this client allows 1 " in reason and len(one.server.deliveries) == 2


def test_values_beside_the_parameters_are_refused_where_a_distance_is_set(tmp_path: Path) -> None:
    plan = PLAN.replace({"model": {"name": "lora_mlp"}, "algorithm": "flora"})
    one = One(tmp_path, plan, Floors(max_change=1.0))
    with one.joined() as client:
        one.order()
        client.step()
    [reason] = one.reasons()
    assert "flora" in reason and "floors.max_change" in reason and not one.server.deliveries


def test_a_distance_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="max_change"):
        Floors(max_change=0.0)
