"""Algorithms that give clients models of their own: slow references by plain torch, and settings that give another one.

Shapes: D parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless
from torch import Tensor, nn
from torch.func import functional_call

from atoll import Plan, run
from atoll.core.messages import MEMBERS, Task
from atoll.core.params import flatten
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.job import Job

LR, ROUNDS, NUM = 0.1, 2, 12
Clients = dict[int, dict[str, Tensor]]
Work = Callable[["Reference", int, Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]
"""(reference, client, shared parameters, memory) -> the parameters to average, and the client's own model."""


class Reference:
    """FedAvg of all clients, in which each does some work, by autograd on the model alone."""

    def __init__(self, plan: Plan) -> None:
        self.job: Job = build_job(plan)
        dataset = self.job.federation.dataset
        self.x = torch.from_numpy(dataset.train_x).float() * dataset.scale
        self.y = torch.from_numpy(dataset.train_y)
        self.version = 0

    def batches(self, client: int) -> list[Tensor]:
        drawn = client_batches(self.job, Task(client, self.version, self.version))
        return [torch.from_numpy(batch) for batch in drawn]

    def grad(self, params_D: Tensor, batch: Tensor) -> Tensor:
        leaf_D = params_D.detach().clone().requires_grad_()
        outputs = functional_call(self.job.model, self.job.spec.views(leaf_D), (self.x[batch],))
        return torch.autograd.grad(nn.functional.cross_entropy(outputs, self.y[batch]), leaf_D)[0]

    def run(self, work: Work) -> tuple[Tensor, dict[int, Tensor]]:
        shared_D, memories, own = self.job.first_D, {c: dict[str, Tensor]() for c in range(NUM)}, dict[int, Tensor]()
        sizes = [self.job.federation.num_samples(client) for client in range(NUM)]
        for self.version in range(ROUNDS):
            moved = [work(self, client, shared_D, memories[client]) for client in range(NUM)]
            own = {client: each[1] for client, each in enumerate(moved)}
            shared_D = sum((n * each[0] for n, each in zip(sizes, moved, strict=True)), start=torch.zeros(())) / sum(
                sizes
            )
        return shared_D, own


def ditto(to: Reference, client: int, shared_D: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    w_D, v_D = shared_D, memory.get("v", shared_D)
    for batch in to.batches(client):
        v_D = v_D - LR * (to.grad(v_D, batch) + 0.5 * (v_D - shared_D))
        w_D = w_D - LR * to.grad(w_D, batch)
    memory["v"] = v_D
    return w_D, v_D


def apfl(to: Reference, client: int, shared_D: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    w_D, v_D, a = shared_D, memory.get("v", shared_D), memory.get("a", torch.tensor(0.5))
    for number, batch in enumerate(to.batches(client)):
        slope_D = to.grad(a * v_D + (1 - a) * w_D, batch)
        learnt = (a - LR * (v_D - w_D) @ slope_D).clamp(0, 1)
        v_D, w_D = v_D - LR * a * slope_D, w_D - LR * to.grad(w_D, batch)
        a = learnt if number == 0 else a
    memory |= {"v": v_D, "a": a}
    return w_D, v_D


def pfedme(to: Reference, client: int, shared_D: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    w_D, t_D = shared_D, memory.get("t", shared_D)
    for batch in to.batches(client):
        for _ in range(3):
            t_D = t_D - 0.05 * (to.grad(t_D, batch) + 2.0 * (t_D - w_D))
        w_D = w_D - LR * 2.0 * (w_D - t_D)
    memory["t"] = t_D
    return w_D, t_D


def per_fedavg(to: Reference, client: int, shared_D: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    w_D = shared_D
    for batch in to.batches(client):
        parts = [batch[start::3] for start in range(3)]
        if min(map(len, parts)) == 0:  # a batch of one or two
            parts = [part if len(part) else batch[:0] for part in parts]
        grad = [(lambda p_D, part=part: to.grad(p_D, part) if len(part) else torch.zeros_like(p_D)) for part in parts]
        g_D = grad[1](w_D - 0.2 * grad[0](w_D))
        bent_D = (grad[2](w_D + 1e-2 * g_D) - grad[2](w_D - 1e-2 * g_D)) / 2e-2
        w_D = w_D - LR * (g_D - 0.2 * bent_D)
    return w_D, w_D


def multi_task(to: Reference, client: int, shared_D: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    w_D = memory.get("w", shared_D)
    for batch in to.batches(client):
        w_D = w_D - LR * (to.grad(w_D, batch) + 0.3 * (w_D - shared_D))
    memory["w"] = w_D
    return w_D, w_D


@pytest.mark.parametrize(
    ("algorithm", "work"),
    [
        ({"name": "ditto", "lam": 0.5}, ditto),
        ({"name": "apfl"}, apfl),
        ({"name": "pfedme", "lam": 2.0, "steps": 3, "lr": 0.05}, pfedme),
        ({"name": "per_fedavg", "alpha": 0.2, "way": "hessian_free", "delta": 1e-2, "steps": 0}, per_fedavg),
        ({"name": "mean_regularised", "lam": 0.3}, multi_task),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_algorithms_are_the_papers(digits_plan: Plan, algorithm: dict[str, Any], work: Work) -> None:
    plan = digits_plan.replace({"algorithm": algorithm, "policy.size": NUM, "rounds": ROUNDS})
    shared_D, own = Reference(plan).run(work)
    for engine in ("inline", {"name": "vectorised", "stack": 5}):
        result = run(plan.replace({"engine": engine}))
        torch.testing.assert_close(result.params_D, shared_D, atol=1e-5, rtol=1e-4)
        if algorithm["name"] in ("apfl", "per_fedavg"):  # what a client uses is made of both models
            continue
        for client, own_D in own.items():
            found_D = flatten(result.models[client], build_job(plan).spec)
            torch.testing.assert_close(found_D, own_D, atol=1e-5, rtol=1e-4)


def test_fedrep_moves_the_head_first(digits_plan: Plan) -> None:
    """In a task of two steps only the head moves first, then only the body."""
    plan = digits_plan.replace({"algorithm": "fedrep", "policy.size": 1, "rounds": 1, "local.steps": 2})
    job = build_job(plan)
    [client] = (result := run(plan)).models
    reference = Reference(plan.replace({"algorithm": "fedavg"}))
    batches = client_batches(reference.job, Task(client, 0, 0))
    spec, first_D = reference.job.spec, reference.job.first_D
    head = torch.zeros_like(first_D)
    for slot in spec.slots[-2:]:
        head[slot.offset : slot.offset + slot.size] = 1
    after_D = first_D - LR * head * reference.grad(first_D, torch.from_numpy(batches[0]))
    after_D = after_D - LR * (1 - head) * reference.grad(after_D, torch.from_numpy(batches[1]))
    torch.testing.assert_close(flatten(result.models[client], spec), after_D, atol=1e-6, rtol=1e-5)
    assert {slot.name for slot in job.spec.kept} == {slot.name for slot in spec.slots[-2:]}


def alone(plan: Plan) -> dict[int, Tensor]:
    """Clients' models that were trained alone."""
    result, spec = run(plan.replace({"algorithm": "local"})), build_job(plan.replace({"algorithm": "local"})).spec
    return {client: flatten(model, spec) for client, model in result.models.items()}


def own_models(plan: Plan) -> dict[int, Tensor]:
    spec = build_job(plan.replace({"algorithm": "fedavg"})).spec
    return {client: flatten(model, spec) for client, model in run(plan).models.items()}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedper"},
        {"name": "lg_fedavg"},
        {"name": "fedbn"},
        {"name": "fedrep", "head": 0.0},
        {"name": "ditto", "lam": 0.3},
        {"name": "apfl"},
        {"name": "interpolation"},
        {"name": "per_fedavg", "alpha": 0.0},
        {"name": "fine_tuning", "steps": 0},
        {"name": "ifca", "clusters": 1},
    ],
    ids=lambda each: each["name"],
)
def test_all_shared_is_fedavg(digits_plan: Plan, algorithm: dict[str, Any]) -> None:
    """What all share is FedAvg's model, to the bit."""
    keeps = algorithm["name"] in ("fedper", "lg_fedavg", "fedbn", "fedrep")
    plan = digits_plan.replace({"evaluation.validation": 0.1, **({"share": ["*"]} if keeps else {})})
    plain = run(plan.replace({"algorithm": "fedavg", "share": None}))
    for engine in ("inline", {"name": "vectorised", "stack": 5}):
        other = run(plan.replace({"algorithm": algorithm, "engine": engine}))
        if engine == "inline":
            assert torch.equal(other.params_D, plain.params_D)
        torch.testing.assert_close(other.params_D, plain.params_D, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ditto", "lam": 0.0},
        {"name": "apfl", "weight": 1.0, "adaptive": False},
        {"name": "pfedme", "lam": 0.0, "steps": 1},
        {"name": "mean_regularised", "lam": 0.0},
    ],
    ids=lambda each: each["name"],
)
def test_nothing_shared_is_training_alone(digits_plan: Plan, algorithm: dict[str, Any]) -> None:
    plan = digits_plan.replace({"policy.size": NUM, "rounds": 2})
    found, expected = own_models(plan.replace({"algorithm": algorithm})), alone(plan)
    assert found.keys() == expected.keys()
    for client, own_D in found.items():
        assert torch.equal(own_D, expected[client])


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_one_end_of_a_mixture(digits_plan: Plan, weight: float) -> None:
    """With a weight of 0 a client uses FedAvg's model, with 1 the one that it trained alone."""
    plan = digits_plan.replace({"policy.size": NUM, "algorithm": {"name": "apfl", "weight": weight, "adaptive": False}})
    expected = alone(plan) if weight else dict.fromkeys(range(NUM), run(plan.replace({"algorithm": "fedavg"})).params_D)
    for client, own_D in own_models(plan).items():
        assert torch.equal(own_D, expected[client])


def test_training_alone_sends_nothing_of_a_client(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"algorithm": "local"})
    assert torch.equal(run(plan).params_D, build_job(plan).first_D)


def test_a_mixture_is_chosen_by_validation_samples(digits_plan: Plan) -> None:
    """The chosen model has the least validation loss of all weights on the grid; those samples are not trained on."""
    plan = digits_plan.replace(
        {
            "algorithm": {"name": "interpolation", "grid": 5},
            "evaluation.validation": 0.3,
            "evaluation.holdout": 0.2,
            "policy.size": NUM,
        }
    )
    job, result = build_job(plan), run(plan)
    federation = job.federation
    trained = own_models(plan.replace({"algorithm": {"name": "ditto", "lam": 0.0}}))
    for client in range(NUM):
        parts = [federation.train_indices(client), federation.evaluation_indices(client)]
        x, y = federation.validation_samples(client).load()
        assert len(y) + sum(map(len, parts)) == federation.partition.size(client)
        losses = []
        for weight in torch.linspace(0, 1, 5):
            mixed_D = torch.lerp(result.params_D, trained[client], weight)
            outputs = functional_call(job.model, job.spec.views(mixed_D), (x,))
            losses.append(float(nn.functional.cross_entropy(outputs, y)))
        chosen = nn.functional.cross_entropy(result.models[client](x), y)
        assert float(chosen) == pytest.approx(min(losses), rel=1e-5)


def test_clusters_are_averaged_apart(digits_plan: Plan) -> None:
    """Each model of IFCA becomes the mean of the clients that took it, and stays if nobody did."""
    plan = digits_plan.replace({"algorithm": {"name": "ifca", "clusters": 3}, "policy.size": NUM, "rounds": 1})
    job, result = build_job(plan), run(plan, watch=[])
    inner = job.architectures[0]
    firsts = job.first_D.view(3, -1)
    reference = Reference(plan.replace({"algorithm": "fedavg"}))
    sizes = [inner.federation.num_samples(client) for client in range(NUM)]
    took: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for client in range(NUM):
        indices = torch.from_numpy(inner.federation.train_indices(client))
        losses = []
        for first_D in firsts:
            outputs = functional_call(inner.model, inner.spec.views(first_D), (reference.x[indices],))
            losses.append(float(nn.functional.cross_entropy(outputs, reference.y[indices])))
        took[losses.index(min(losses))].append(client)
    assert sum(map(bool, took.values())) >= 2
    for number, clients in took.items():
        expected_D = firsts[number]
        if clients:
            ends = []
            for client in clients:
                w_D = firsts[number]
                for batch in reference.batches(client):
                    w_D = w_D - LR * reference.grad(w_D, batch)
                ends.append(sizes[client] * w_D)
            expected_D = torch.stack(ends).sum(0) / sum(sizes[client] for client in clients)
        torch.testing.assert_close(result.params_D.view(3, -1)[number], expected_D, atol=1e-5, rtol=1e-4)


PERSONAL = ["fedper", "fedrep", "ditto", "apfl", "pfedme", "mean_regularised", "ifca", "interpolation", "fine_tuning"]


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("fedrep", "ifca"))) for name in PERSONAL],
)
def test_own_models_are_measured_and_resumed(digits_plan: Plan, tmp_path: Path, algorithm: str) -> None:
    """Rows and own models after a resumed run, and with workers, are those of the whole one."""
    settings = {"holdout": 0.2, "validation": 0.1, "clients_every": 1}
    plan = digits_plan.replace({"algorithm": algorithm, "evaluation": settings, "model": "helpers:grouped"})
    whole = run(plan)
    run(plan.replace({"rounds": 1}), out=tmp_path / "run")
    resumed = run(plan, out=tmp_path / "run", resume=True)
    assert timeless(resumed.history) == timeless(whole.history)
    assert resumed.models.keys() == whole.models.keys()
    for client in list(whole.models)[:3]:
        for name, value in whole.models[client].state_dict().items():
            assert torch.equal(resumed.models[client].state_dict()[name], value)
    assert ("shared_test" in whole.history[-1]) == (whole.shared is not None)


def test_what_clients_take_of_clusters_is_remembered(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"algorithm": "ifca", "rounds": 1})
    job = build_job(plan)
    assert job.extras[MEMBERS].shape == (2,) and len(job.first_D) == 2 * len(build_job(digits_plan).first_D)
    assert not torch.equal(*job.first_D.view(2, -1))  # models that are alike would stay so


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_own_models_take_their_steps_where_gradients_are_off(digits_plan: Plan, mode: Callable[[], Any]) -> None:
    result = run(digits_plan.replace({"algorithm": {"name": "fine_tuning", "steps": 3}, "rounds": 1}))
    expected = result.models[0].state_dict()
    with mode():
        found = result.models[0].state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
