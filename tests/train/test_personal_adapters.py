"""A personal adapter beside the shared one, mixed by a weight that each client learns."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Dataset, Plan, run
from atoll.core.errors import PlanError
from atoll.core.personal_adapters import KEEP, Personal, mixing_weights
from atoll.models.lora_mlp import lora_mlp
from atoll.testing.runs import must_resume
from atoll.train.build import build_job

MIX: dict[str, Any] = {"model.personal_rank": 2, "keep": [KEEP]}
NUM, ROWS, INPUTS, CLASSES = 8, 200, 12, 4


def tasks(seed: int = 0) -> Dataset:
    """Clients whose classes are those of one matrix that all share, plus a product of rank 1 of their own."""
    rng = np.random.default_rng(seed)
    shared_IK = rng.normal(size=(INPUTS, CLASSES))
    x = rng.normal(size=(NUM, ROWS, INPUTS)).astype(np.float32)
    own = [np.outer(rng.normal(size=INPUTS), rng.normal(size=CLASSES)) for _ in range(NUM)]
    y = np.stack([(x[client] @ (shared_IK + 1.5 * own[client])).argmax(1) for client in range(NUM)])
    few = x[:, 0], y[:, 0]
    owners = np.repeat(np.arange(NUM), ROWS)
    parts = {"train_x": x.reshape(-1, INPUTS), "train_y": y.reshape(-1), "test_x": few[0], "test_y": few[1]}
    return Dataset(name="tasks", num_classes=CLASSES, owners=owners, **parts)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(
        data=tasks(),
        partition="natural",
        model={"name": "lora_mlp", "hidden": 32, "rank": 4, "alpha": 4.0},
        algorithm="fedit",
        local={"lr": 0.01, "batch_size": 20, "epochs": 1, "optimizer": "adam"},
        evaluation={"holdout": 0.5, "clients_every": 5, "every": 0},
        rounds=25,
        engine="inline",
    )


def best(plan: Plan) -> float:
    """The mean loss on the clients' held-out samples, in the round where it is least."""
    return min(row["clients_test"]["loss"] for row in run(plan).history if "clients_test" in row)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_mix_beats_both_of_its_parts(plan: Plan, seed: int) -> None:
    plan = Plan(**{**vars(plan), "data": tasks(seed)})
    shared, alone, mixed = (best(plan.replace(change)) for change in ({}, {"algorithm": "local"}, MIX))
    assert mixed < alone - 0.05 < shared - 0.05  # 0.59, 0.73 and 1.02 nats with seed 0


def test_clients_learn_weights_of_their_own(plan: Plan) -> None:
    result = run(plan.replace(MIX))
    weights = {client: mixing_weights(model) for client, model in result.models.items()}
    assert all(list(each) == ["1", "3"] for each in weights.values())
    last = [each["3"] for each in weights.values()]
    assert len(weights) == NUM and max(last) - min(last) > 0.1 and all(0 < value < 1 for value in last)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedit", "ffa_lora"])
def test_only_the_shared_adapter_travels(plan: Plan, algorithm: str) -> None:
    plan = plan.replace({**MIX, "algorithm": algorithm, "rounds": 2, "evaluation.clients_every": 1})
    job, before = build_job(plan), build_job(plan.replace({"model.personal_rank": 0, "keep": None}))
    assert job.spec.slots == before.spec.slots
    assert len(job.spec.kept) == 2 * 3 and all(".personal." in slot.name for slot in job.spec.kept)
    without = run(plan.replace({"model.personal_rank": 0, "keep": None}))
    assert run(plan).history[-1]["bytes_up"] == without.history[-1]["bytes_up"]
    must_resume(plan)


def test_engines_agree(plan: Plan) -> None:
    plan = plan.replace({**MIX, "rounds": 2})
    one, two = (run(plan.replace({"engine": engine})).params_D for engine in ("inline", "vectorised"))
    assert torch.allclose(one, two, atol=1e-5) and not torch.equal(one, build_job(plan).first_D)


def test_the_weight_mixes_the_adapters() -> None:
    torch.manual_seed(0)
    model = lora_mlp((6,), 3, hidden=5, rank=2, personal_rank=2).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        twin = copy.deepcopy(model)
        layer = twin[1]
        own: Any = layer.base_layer.personal  # type: ignore[union-attr]
        assert isinstance(own, Personal)
        weight = float(torch.sigmoid(own.gate))
        base = layer.base_layer.base_layer(x)  # type: ignore[union-attr,operator]
        shared, personal = layer.lora_B.weight @ layer.lora_A.weight, own.B.weight @ own.A.weight  # type: ignore[union-attr]
        due = base + 4.0 * ((1 - weight) * x @ shared.T + weight * x @ personal.T)
        assert torch.allclose(layer(x), due) and torch.equal(twin(x), model(x))
        own.gate.fill_(-100.0)  # the shared one alone
        assert torch.allclose(layer(x), base + 4.0 * x @ shared.T)
        assert not torch.allclose(twin(x), model(x))  # a copy has a gate of its own


def test_personal_adapters_that_would_travel_are_refused(plan: Plan) -> None:
    for keep in (None, ["*.gate"], ["*lora_B*"]):
        with pytest.raises(PlanError, match=r'set keep = \["\*\.personal\.\*"\]') as error:
            build_job(plan.replace({**MIX, "keep": keep}))
        assert error.value.rule == "personal-adapters-stay"
