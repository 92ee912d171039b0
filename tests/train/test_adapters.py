"""Algorithms for low-rank adapters: what they average, what that misses, what travels, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.api import run
from atoll.commit.server_step import aggregated, server_task, stepped
from atoll.commit.travels import DOWN, travels
from atoll.core.adapters import adapted_layers, aggregation_error, factor, pairs_of, scaling_of
from atoll.core.aggregator import as_rows
from atoll.core.errors import PlanError
from atoll.core.messages import Payload, Task, Update, stack
from atoll.core.params import load
from atoll.core.plan import Plan
from atoll.core.wire import packed_size
from atoll.models.lora_mlp import LowRankLinear
from atoll.train.build import build_job
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.model import build_model
from atoll.train.trainer import Trainer

MODEL = {"name": "lora_mlp", "hidden": 16, "rank": 4}
EXACT = ("ffa_lora", "flora", "fedex_lora")
CLIENTS = (0, 3, 5, 7)


def plan_of(algorithm: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "model": MODEL,
        "algorithm": algorithm,
        "partition": {"name": "dirichlet", "alpha": 0.3, "num_clients": 8},
        "policy": {"size": 4},
        "local": {"lr": 0.1, "batch_size": 16, "epochs": 2},
        "rounds": 2,
        "engine": "inline",
    }
    return Plan(**{**settings, **changes})


def weights(model: nn.Module) -> list[Tensor]:
    """The whole weight of each adapted layer, in float64, from its definition."""
    found = []
    for layer in adapted_layers(model, "this test").values():
        assert isinstance(layer, LowRankLinear)
        base = layer.base_layer
        rest: Any = base.rest.double() if hasattr(base, "rest") else 0.0
        frozen = base.base_layer if hasattr(base, "rest") else base
        product = factor(layer, "B").detach().double() @ factor(layer, "A").detach().double()
        found.append(frozen.weight.double() + scaling_of(layer) * (rest + product))
    return found


def one_round(job: Job, model_M: Tensor, version: int) -> tuple[Update, Tensor]:
    """The updates of a cohort, and the next model."""
    sent, trainer = broadcast_of(job, model_M, first_server(job, model_M)), Trainer(job)
    updates = stack([trainer.train_one(Task(client, version, version), sent, {}).update for client in CLIENTS])
    folded = as_rows(updates) if job.wants_rows else job.aggregator.add(job.aggregator.zero(), updates)
    aggregate, _ = aggregated(job, folded, job.aggregator.init())
    after_M, _ = stepped(job, model_M, aggregate, first_server(job, model_M), version, 8)
    return updates, after_M


def error_of(plan: Plan, rounds: int = 2) -> float:
    """How far the layers of the second model are from the mean of the clients' layers, as a share of its change."""
    job = build_job(plan)
    model_M = job.first_D
    for version in range(rounds):
        before_M = model_M
        updates, model_M = one_round(job, before_M, version)

    def weights_of(vector_M: Tensor) -> list[Tensor]:
        return weights(load(build_model(plan, job.federation), job.spec, vector_M))

    share_C = updates.weight.double() / updates.weight.double().sum()
    mean = [torch.zeros_like(weight) for weight in weights_of(before_M)]
    for share, delta_D in zip(share_C, updates.delta_D, strict=True):
        client_M = before_M.clone()
        client_M[: len(delta_D)] += delta_D
        mean = [total + share * weight for total, weight in zip(mean, weights_of(client_M), strict=True)]
    missed = sum(float((new - due).square().sum()) for new, due in zip(weights_of(model_M), mean, strict=True))
    wanted = sum(float((due - old).square().sum()) for old, due in zip(weights_of(before_M), mean, strict=True))
    assert wanted > 1e-6
    return float((missed / wanted) ** 0.5)


@pytest.mark.parametrize("algorithm", EXACT)
def test_the_mean_of_products_is_exact(algorithm: str) -> None:
    assert error_of(plan_of(algorithm)) < 1e-6


def test_the_mean_of_factors_is_not_and_its_error_is_shown() -> None:
    error = error_of(plan_of("fedit"))
    assert error > 0.05
    shown = [row["algorithm"]["aggregation_error"] for row in run(plan_of("fedit", policy={"size": 8})).history]
    assert all(value > 0.01 for value in shown)
    job = build_job(plan_of("fedit"))
    updates, after_M = one_round(job, job.first_D, 0)
    aggregate, _ = aggregated(job, as_rows(updates), job.aggregator.init())
    measured = aggregation_error(job.first_D, after_M, aggregate, server_task(job, 0, 8))
    assert measured["aggregation_error"] == pytest.approx(error_of(plan_of("fedit"), rounds=1), rel=1e-5)


@pytest.mark.parametrize("server_lr", [0.5, 1.0])
def test_a_server_step_of_another_length_moves_the_products_by_it(server_lr: float) -> None:
    for algorithm in ("flora", "fedex_lora"):
        rows = run(plan_of(algorithm, server={"lr": server_lr})).history
        assert all(row["algorithm"]["aggregation_error"] < 1e-6 for row in rows)


def test_fedit_is_fedavg_on_factors() -> None:
    plain, unmeasured = (run(plan_of(each)).params_D for each in ("fedavg", {"name": "fedit", "measure": False}))
    assert torch.equal(plain, unmeasured)
    assert torch.allclose(run(plan_of("fedit")).params_D, plain, atol=1e-5)


def test_flora_begins_anew_each_round() -> None:
    result = run(plan_of("flora"))
    layers = adapted_layers(result.model, "this test").values()
    first = build_model(plan_of("flora"), build_job(plan_of("flora")).federation)
    for layer, begun in zip(layers, adapted_layers(first, "this test").values(), strict=True):
        a, b = factor(layer, "A"), factor(layer, "B")
        assert not b.any() and bool(layer.base_layer.rest.any())  # type: ignore[union-attr, operator]
        assert not torch.equal(a, factor(begun, "A"))
        assert float(a.detach().abs().max()) <= a.shape[1] ** -0.5


@pytest.mark.parametrize("algorithm", ["fedit", *EXACT])
def test_bytes_are_those_of_factors_up_and_of_the_rest_down(algorithm: str) -> None:
    plan = plan_of(algorithm, rounds=1)
    job, row = build_job(plan), run(plan).history[0]
    num = sum(p.numel() for name, p in job.model.named_parameters() if "lora_B" in name or "lora_A" in name)
    num -= sum(p.numel() for name, p in job.model.named_parameters() if "lora_A" in name and algorithm == "ffa_lora")
    assert job.spec.num_trainable == num
    assert row["bytes_up"] == 4 * packed_size(Payload(torch.zeros(num)))
    rest = 16 * 64 + 10 * 16 if algorithm in ("flora", "fedex_lora") else 0
    down = {each.name: each.num_values for each in travels(job).values if each.goes == DOWN}
    assert sum(down.values()) == rest == job.spec.num_held
    per_client = row["bytes_down"] / 4
    assert 4 * (num + rest) < per_client < 4 * (num + rest) + 200


@pytest.mark.parametrize("algorithm", ["fedit", *EXACT])
def test_clients_of_other_ranks_train_their_part(algorithm: str) -> None:
    plan = plan_of({"name": algorithm, "ranks": [1, 4]}, rounds=1)
    job = build_job(plan)
    updates, _ = one_round(job, job.first_D, 0)
    for client, delta_D in zip(CLIENTS, updates.delta_D, strict=True):
        rank = 4 if client % 2 else 1
        for name, change in job.spec.without_buffers.views(delta_D).items():
            rows = change if "lora_A" in name else change.T
            assert bool(rows[:rank].any()) or "lora_A" in name  # A moves once B has
            assert not rows[rank:].any()
    assert error_of(plan) < 1e-6 if algorithm in EXACT else error_of(plan) > 0.02


def test_a_client_of_low_rank_gets_the_model_without_the_rest() -> None:
    """Its loss is that of a model whose other factors are zero."""
    plan = plan_of({"name": "fedit", "ranks": [1]}, local={"lr": 1e-9, "batch_size": "all", "steps": 1})
    job = build_job(plan)
    full_M = job.first_D + 0.3
    cut_M = full_M.clone()
    for pair in pairs_of(job.spec):
        job.spec.views(cut_M)[pair.a.name][1:] = 0
        job.spec.views(cut_M)[pair.b.name][:, 1:] = 0
    losses = []
    whole = plan.replace({"algorithm": "fedit"})
    for each, model_M in ((plan, full_M), (whole, cut_M), (whole, full_M)):
        job = build_job(each)
        losses.append(Trainer(job).train_one(Task(0, 0, 0), broadcast_of(job, model_M, {}), {}).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize("privacy", ["sample", "local"])
def test_private_steps_see_what_the_server_added(privacy: str) -> None:
    noise = {"name": privacy, "clip": 0.5, "sigma": 1e-3, "delta": 1e-5, "test_noise": True}
    local = {"lr": 0.5, "batch_size": 16, "steps": 3}
    plan = plan_of("flora", privacy=noise, local=local, rounds=3, evaluation={"every": 0})
    one_by_one, together = (run(plan.replace({"engine": engine})) for engine in ("inline", "vectorised"))
    assert (one_by_one.params_D - together.params_D).abs().max() < 2e-5
    assert "algorithm" not in one_by_one.history[0]  # nothing but what the mechanism covers is told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "logistic"}, "has none: use a model with them"),
        ({"algorithm": {"name": "flora", "ranks": [8]}}, "lower algorithm.ranks, or raise model.rank"),
        ({"secagg": {}}, "flora needs each client's update"),
        ({"aggregator": "median"}, "use ffa_lora"),
        ({"keep": ["*lora_A*"]}, "leave keep and share out"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        run(plan_of("flora").replace(changes))


@pytest.mark.parametrize("algorithm", ["fedit", "ffa_lora"])
def test_linear_updates_go_under_masks_and_robust_rules(algorithm: str) -> None:
    plain = run(plan_of(algorithm)).params_D
    secret = run(plan_of(algorithm, secagg={}))
    assert (secret.params_D - plain).abs().max() < 1e-3 and "algorithm" not in secret.history[0]
    robust = run(plan_of(algorithm, aggregator="median")).params_D
    assert bool(robust.isfinite().all()) and not torch.equal(robust, plain)
