"""What clients get that are held out of training: figures after steps of adaptation, recomputed by plain torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import Plan, Result, run
from atoll.core.errors import PlanError
from atoll.core.plan import ADAPT_STEPS
from atoll.train.build import build_job
from atoll.train.federation import build_federation
from atoll.train.job import broadcast_of, first_server
from atoll.train.loop_worker import LoopWorker
from atoll.train.model import build_model

HEAD = ["5.*"]
"""The last layer of mlp_2nn."""


def stepped(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float, moving: str = "", pull: float = 0.0
) -> nn.Module:
    """Return a model after full-batch steps of those parameters whose names begin so, pulled to where they began."""
    model = copy.deepcopy(model).train()
    moved = [parameter for name, parameter in model.named_parameters() if name.startswith(moving)]
    first = [parameter.detach().clone() for parameter in moved]
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss + sum(pull / 2 * (p - start).square().sum() for p, start in zip(moved, first, strict=True))
        with torch.no_grad():
            for parameter, grad in zip(moved, torch.autograd.grad(loss, moved), strict=True):
                parameter -= lr * grad
    return model.eval()


def recomputed(plan: Plan, on_arrival: nn.Module, **how: Any) -> dict[int, dict[str, float]]:
    """Return the figures of new clients by plain torch."""
    federation, dataset = build_federation(plan), build_federation(plan).dataset
    x, y = torch.from_numpy(np.asarray(dataset.train_x)).float() * dataset.scale, torch.from_numpy(dataset.train_y)
    figures = {}
    for steps in plan.evaluation.adapt_steps or ADAPT_STEPS:
        scores = []
        for client in federation.new_clients:
            trained, tested = federation.train_indices(client), federation.evaluation_indices(client)
            model = stepped(on_arrival, x[trained], y[trained], steps, **{"lr": plan.local.lr, **how})
            with torch.no_grad():
                outputs = model(x[tested])
            right = (outputs.argmax(1) == y[tested]).double().mean()
            scores.append((float(right), float(nn.functional.cross_entropy(outputs, y[tested]))))
        main = sorted(score for score, _ in scores)
        mean, loss = sum(main) / len(main), sum(loss for _, loss in scores) / len(scores)
        figures[steps] = {"mean": mean, "worst_decile": main[0], "loss": loss}
    return figures


def assert_figures(result: Result, expected: dict[int, dict[str, float]]) -> None:
    assert list(result.new_clients) == list(expected)
    for steps, figures in expected.items():
        found = {name: result.new_clients[steps][name] for name in figures}
        assert found == pytest.approx(figures, abs=1e-5), steps
    assert expected[0]["loss"] != pytest.approx(expected[20]["loss"], abs=1e-2)


FULL = {"local": {"lr": 0.3, "batch_size": "all", "epochs": 3}}


def test_of_a_shared_model_they_take_plain_steps(new_plan: Plan) -> None:
    plan = new_plan.replace(FULL)
    result = run(plan)
    assert_figures(result, recomputed(plan, result.model))
    assert set(result.new_clients[0]) == {"num_clients", "mean", "std", "worst_decile", "loss"}
    assert result.new_clients[0]["num_clients"] == 4


def test_of_kept_parameters_they_move_these_alone(new_plan: Plan) -> None:
    """What is shared stays as it was sent, and what a client keeps begins with the model's first values."""
    plan = new_plan.replace({**FULL, "algorithm": "fedper", "keep": HEAD})
    result = run(plan)
    model = build_model(plan, build_federation(plan))
    shared = {name: value for name, value in result.models[0].state_dict().items() if not name.startswith("5.")}
    model.load_state_dict({**model.state_dict(), **shared})
    assert_figures(result, recomputed(plan, model, moving="5."))


def test_own_models_are_made_by_the_algorithm_itself(new_plan: Plan) -> None:
    """Ditto's own model begins as the shared one and is pulled to it."""
    plan = new_plan.replace({**FULL, "algorithm": {"name": "ditto", "lam": 0.5}})
    result = run(plan)
    assert_figures(result, recomputed(plan, result.model, pull=0.5))


@pytest.mark.parametrize(
    ("algorithm", "lr"), [({"name": "per_fedavg", "alpha": 0.2}, 0.2), ({"name": "fine_tuning", "lr": 0.4}, 0.4)]
)
def test_adaptation_has_its_own_step_size(new_plan: Plan, algorithm: dict[str, Any], lr: float) -> None:
    plan = new_plan.replace({**FULL, "algorithm": algorithm})
    result = run(plan)
    assert_figures(result, recomputed(plan, result.model, lr=lr))


def test_training_alone_is_their_steps_from_the_first_model(new_plan: Plan) -> None:
    plan = new_plan.replace({**FULL, "algorithm": "local"})
    assert_figures(run(plan), recomputed(plan, build_model(plan, build_federation(plan))))


def test_a_cluster_is_chosen_by_their_training_samples(new_plan: Plan) -> None:
    """Each new client adapts the cluster's model that has the least loss on the samples that it trains on."""
    plan = new_plan.replace({**FULL, "algorithm": "ifca"})
    result, job = run(plan), build_job(plan)
    federation, dataset = job.federation, job.federation.dataset
    kinds = [copy.deepcopy(each.model) for each in job.architectures]
    for kind, each, values in zip(kinds, job.architectures, result.params_D.view(2, -1), strict=True):
        kind.load_state_dict(each.spec.views(values))
    x, y = torch.from_numpy(np.asarray(dataset.train_x)).float() * dataset.scale, torch.from_numpy(dataset.train_y)
    expected: dict[int, list[float]] = {steps: [] for steps in ADAPT_STEPS}
    chosen = set[int]()
    for client in federation.new_clients:
        trained, tested = federation.train_indices(client), federation.evaluation_indices(client)
        losses = [float(nn.functional.cross_entropy(kind(x[trained]), y[trained]).detach()) for kind in kinds]
        chosen.add(int(np.argmin(losses)))
        for steps in ADAPT_STEPS:
            model = stepped(kinds[int(np.argmin(losses))], x[trained], y[trained], steps, plan.local.lr)
            expected[steps].append(float(nn.functional.cross_entropy(model(x[tested]), y[tested]).detach()))
    for steps, losses in expected.items():
        assert result.new_clients[steps]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert chosen == {0, 1}


SAME_AS_FEDAVG = [
    {"name": "ditto", "lam": 0},
    {"name": "fine_tuning", "steps": 3},
    {"name": "apfl", "weight": 1.0, "adaptive": False},
    {"name": "ifca", "clusters": 1},
    {"name": "per_fedavg", "alpha": 0},
]


@pytest.mark.parametrize("algorithm", SAME_AS_FEDAVG, ids=str)
def test_degenerate_settings_give_what_fedavg_gives(new_plan: Plan, algorithm: dict[str, Any]) -> None:
    plain, other = run(new_plan), run(new_plan.replace({"algorithm": algorithm}))
    for steps, figures in plain.new_clients.items():
        assert other.new_clients[steps] == pytest.approx(figures, abs=1e-6), steps


# --- batch norm -------------------------------------------------------------------------------------------------------


def arrived(plan: Plan, steps: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return what the first new client has after steps from the first model, and that model."""
    job = build_job(plan)
    worker = job.work.open(job)
    assert isinstance(worker, LoopWorker)
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    return *worker.arrived(sent, job.federation.new_clients[0], steps), job.first_D


def test_shared_statistics_stay_as_they_were_sent(new_plan: Plan) -> None:
    plan = new_plan.replace({"model": "helpers:normed", "keep": ["out.*"]})
    params_D, memory, first_D = arrived(plan, 5)
    assert torch.equal(params_D, first_D) and set(memory) == {"kept"}
    assert not torch.equal(arrived(plan.replace({"keep": None}), 5)[0][-8:], first_D[-8:])


def test_without_statistics_of_its_own_a_client_is_measured_by_those_of_its_batch(new_plan: Plan) -> None:
    """Where clients keep statistics nobody has any on arrival, whatever else the algorithm remembers of a client."""
    plan = new_plan.replace({"model": "helpers:normed", "local.buffers": "local", "evaluation.clients_every": 3})
    plain, ditto = run(plan), run(plan.replace({"algorithm": "ditto"}))
    assert ditto.new_clients[0] == pytest.approx(plain.new_clients[0], abs=1e-6)
    params_D, memory, first_D = arrived(plan, 5)
    assert set(memory) == {"buffer.norm.running_mean", "buffer.norm.running_var"} and len(params_D) == len(first_D)


def test_a_batch_that_the_model_cannot_train_on_is_refused_before_training(new_plan: Plan) -> None:
    """Batch norm needs two samples: a new client that would meet one alone is found before the first round."""
    plan = new_plan.replace({"model": "helpers:batch_normed", "partition": {"name": "iid", "num_clients": 12}})
    federation = build_federation(plan)
    one_less = federation.num_samples(federation.new_clients[0]) - 1
    plan = plan.replace({"local": {"steps": 1, "batch_size": one_less}})  # others take one step, and meet no rest
    with pytest.raises(PlanError, match=r"batch of 1, which client (8|9|10|11) meets"):
        run(plan)
    assert run(plan.replace({"evaluation.adapt_steps": [0, 1]})).new_clients


def test_before_any_round_they_get_the_first_model(new_plan: Plan) -> None:
    plan = new_plan.replace({**FULL, "rounds": 0})
    assert_figures(run(plan), recomputed(plan, build_model(plan, build_federation(plan))))
