"""FedDF: its step against a slow reference, what it is made of, what it refuses, and that it helps."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import normed, upside_down
from torch import nn

from atoll import Plan, run
from atoll.core.errors import DataError, PlanError
from atoll.core.messages import Broadcast, Task
from atoll.core.params import load
from atoll.core.seeds import generator
from atoll.engine.inline import inline
from atoll.train.build import build_job
from atoll.train.federation import build_federation
from atoll.train.job import Job

HELD_OUT = {"name": "held_out", "fraction": 0.1}


@pytest.fixture
def plan(digits_plan: Plan) -> Plan:
    return digits_plan.replace({"public": HELD_OUT, "algorithm": "feddf"})


def cohort_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """What the 12 clients send up after the first version, as it comes out of the uplink, and their weights."""
    engine = inline(job)
    rows = engine.train([Task(client, 0, 0) for client in range(12)], {0: Broadcast(job.first_D, {})}, {}).folded
    engine.close()
    return rows["delta"], rows["weight"]


def distilled(job: Job, deltas_CD: torch.Tensor, weight_C: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The step of FedDF, written out: one model a client, every sample anew, Adam by its formula."""
    steps, size, temperature = options["steps"], options["batch_size"], options["temperature"]
    average_D = job.first_D + (weight_C[:, None] * deltas_CD).sum(0) / weight_C.sum()
    teachers = [load(copy.deepcopy(job.model), job.spec, job.first_D + delta_D).eval() for delta_D in deltas_CD]
    student = load(copy.deepcopy(job.model), job.spec, average_D).eval()
    assert job.federation.public is not None
    x = torch.from_numpy(job.federation.public.x).float() / 16
    rng = generator(0, "server step", 0)
    order = np.concatenate([rng.permutation(len(x)) for _ in range(math.ceil(steps * size / len(x)))])
    leaves = list(student.parameters())
    first, second = ([torch.zeros_like(leaf) for leaf in leaves] for _ in range(2))
    for number in range(steps):
        batch = x[order[number * size : (number + 1) * size]]
        with torch.no_grad():
            wanted = sum(teacher(batch) for teacher in teachers) / len(teachers)
        log_own, target = (student(batch) / temperature).log_softmax(1), (wanted / temperature).softmax(1)
        loss = nn.functional.kl_div(log_own, target, reduction="batchmean") * temperature**2
        lr = options["lr"] * 0.5 * (1 + math.cos(math.pi * number / steps))
        for place, (leaf, grad) in enumerate(zip(leaves, torch.autograd.grad(loss, leaves), strict=True)):
            first[place] = 0.9 * first[place] + 0.1 * grad
            second[place] = 0.999 * second[place] + 0.001 * grad**2
            mean, square = first[place] / (1 - 0.9 ** (number + 1)), second[place] / (1 - 0.999 ** (number + 1))
            leaf.data -= lr * mean / (square.sqrt() + 1e-8)
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves])


@pytest.mark.parametrize("uplink", [[], [{"name": "quantise", "bits": 3}]], ids=["plain", "quantised"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_step_is_the_papers(plan: Plan, uplink: list[Any], temperature: float) -> None:
    """Also behind a codec: the teachers are what the server decoded."""
    options = {"steps": 20, "batch_size": 50, "lr": 0.003, "temperature": temperature}
    settings = {"algorithm": {"name": "feddf", **options}, "policy": "cohort", "rounds": 1, "uplink": uplink}
    plan = plan.replace({**settings, "policy": {"name": "cohort", "size": 12}})
    job = build_job(plan)
    sent = cohort_of(job)
    wanted_D = distilled(job, *sent, options)
    found_D = run(plan).params_D
    assert (found_D - wanted_D).abs().max() < 3e-4  # Adam turns rounding of tiny slopes into steps
    assert (found_D - wanted_D).norm() < 1e-2 * (found_D - job.first_D).norm()
    average_D = job.first_D + (sent[1][:, None] * sent[0]).sum(0) / sent[1].sum()
    assert (found_D - average_D).norm() > 20 * (found_D - wanted_D).norm()


def test_with_steps_of_no_length_it_is_fedavg(plan: Plan) -> None:
    fedavg = run(plan.replace({"algorithm": "fedavg"})).params_D
    assert (run(plan.replace({"algorithm.lr": 1e-12})).params_D - fedavg).abs().max() < 1e-6


def test_another_data_set_gives_its_features_only(plan: Plan) -> None:
    alone = Plan(**{**plan.to_dict(), "public": upside_down})
    federation = build_federation(alone)
    assert federation.public is not None and federation.public.y is None
    assert len(federation.public.x) == federation.dataset.num_train
    assert not torch.equal(run(alone).params_D, run(plan).params_D)


def test_statistics_of_batch_norm_are_those_of_the_average(plan: Plan) -> None:
    base = {**plan.to_dict(), "model": normed, "rounds": 1, "policy": {"size": 12}}
    feddf, fedavg = (run(Plan(**{**base, "algorithm": name})) for name in ("feddf", "fedavg"))
    buffers = [dict(result.model.named_buffers())["norm.running_mean"] for result in (feddf, fedavg)]
    assert torch.allclose(*buffers, atol=1e-6)
    assert not torch.allclose(feddf.params_D, fedavg.params_D, atol=1e-4)


def test_the_median_makes_the_student_and_all_clients_teach(plan: Plan) -> None:
    mean, median = (run(plan.replace({"aggregator": rule, "rounds": 1})).params_D for rule in ("mean", "median"))
    assert not torch.allclose(mean, median, atol=1e-4)


REFUSED = [
    ({"public": None}, PlanError, "feddf learns from public samples.*held_out"),
    ({"policy": "buffered"}, PlanError, 'policy = "cohort"'),
    ({"policy": "asynchronous"}, PlanError, 'policy = "cohort"'),
    ({"local.buffers": "local"}, PlanError, 'set it to "average"'),
    ({"algorithm.steps": 0}, PlanError, "without distillation it is fedavg"),
    ({"public": {"name": "held_out", "fraction": 1.0}}, PlanError, "leave samples on both sides"),
    ({"public": {"name": "held_out", "share": 0.1}}, PlanError, "no option 'share'"),
    ({"public": "held_oud"}, PlanError, "there is no 'held_oud' in data.catalog"),
    ({"public": "mnist"}, DataError, r"shape \(1, 28, 28\), but one of digits has \(1, 8, 8\)"),
    ({"public": "helpers:quadratic"}, PlanError, "quadratic"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "says"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_what_cannot_be_right_is_refused(plan: Plan, changes: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        build_job(plan.replace(changes))


def test_held_out_samples_belong_to_no_client(plan: Plan) -> None:
    whole, rest = build_federation(plan.replace({"public": None})), build_federation(plan)
    assert rest.public is not None and rest.public.y is not None
    assert len(rest.public.x) == round(0.1 * whole.dataset.num_train)
    assert len(rest.public.x) + rest.dataset.num_train == whole.dataset.num_train
    together = np.concatenate([rest.public.x, rest.dataset.train_x]).reshape(whole.dataset.num_train, -1)
    assert np.array_equal(np.sort(together.sum(1)), np.sort(whole.dataset.train_x.reshape(len(together), -1).sum(1)))
    held = {client: len(rest.train_indices(client)) for client in range(12)}
    assert sum(held.values()) == rest.dataset.num_train
    other = build_federation(plan.replace({"seed": 1}))
    assert other.public is not None and not np.array_equal(other.public.x, rest.public.x)
    natural = build_federation(plan.replace({"data": "synthetic", "partition": "natural"}))
    assert natural.num_clients > 1


@pytest.mark.slow
def test_distillation_helps_where_clients_hold_few_classes(plan: Plan) -> None:
    """Digits dealt by Dirichlet(0.1): the mean of the last three of eight rounds, over three seeds."""
    settings: dict[str, Any] = {
        "partition.alpha": 0.1,
        "model.hidden": 64,
        "local": {"epochs": 5},
        "rounds": 8,
        "policy.size": 6,
    }
    settings["engine"] = {"name": "vectorised", "stack": 6}
    ends: dict[str, list[float]] = {"fedavg": [], "feddf": []}
    for name, seed in [(name, seed) for name in ends for seed in range(3)]:
        history = run(plan.replace({**settings, "algorithm": name, "seed": seed})).history
        ends[name] += [row["test"]["accuracy"] for row in history[-3:]]
    assert np.mean(ends["feddf"]) > np.mean(ends["fedavg"]) + 0.03
