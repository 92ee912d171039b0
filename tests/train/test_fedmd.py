"""FedMD: a round against a slow reference, what travels, what is measured, what it refuses, and that it helps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FRAME, assert_same_end, dropped, normed, timeless, upside_down
from torch import nn

from atoll import Plan, run
from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.core.seeds import generator
from atoll.report.html import write_report
from atoll.report.measuring import measure_plan
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.works.consensus import public_indices

MODELS: list[Any] = ["logistic", {"name": "mlp_2nn", "hidden": 16}, {"name": "mlp_2nn", "hidden": 24}]


@pytest.fixture
def plan(digits_plan: Plan) -> Plan:
    settings = {"algorithm": {"name": "fedmd", "samples": 60}, "models": MODELS}
    return digits_plan.replace({**settings, "public": {"name": "held_out", "fraction": 0.1}})


def passed_over(model: nn.Module, batches: list[Any], x: Any, y: Any, loss: Any) -> None:
    """Plain training with SGD at 0.1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()


def test_three_rounds_are_the_papers(plan: Plan) -> None:
    """Everybody takes part; the order of samples is the run's, all else is written out anew."""
    plan = plan.replace({"policy.size": 12, "rounds": 3, "algorithm.public_epochs": 2, "algorithm.epochs": 2})
    job = build_job(plan)
    federation, public = job.federation, job.federation.public
    assert public is not None and public.y is not None
    x, y = (torch.from_numpy(array) for array in (federation.dataset.train_x, federation.dataset.train_y))
    public_x, public_y = torch.from_numpy(public.x).float() / 16, torch.from_numpy(public.y)
    models = [copy.deepcopy(job.architectures[client % 3].model) for client in range(12)]

    def orders(purpose: str, attempt: int, client: int, num: int) -> list[Any]:
        rng = generator(0, purpose, attempt, client)
        return [order[i : i + 16] for order in (rng.permutation(num), rng.permutation(num)) for i in range(0, num, 16)]

    consensus = torch.zeros(0)
    for version in range(3):
        scores = []
        for client, model in enumerate(models):
            if version == 0:
                batches = orders("public labels", version, client, len(public_x))
                passed_over(model, batches, public_x, public_y, nn.CrossEntropyLoss())
            else:
                batches = orders("digest", version, client, 60)
                passed_over(model, batches, public_x[public_indices(job, version)], consensus, nn.L1Loss())
            passed_over(model, client_batches(job, Task(client, version, version)), x / 16, y, nn.CrossEntropyLoss())
            with torch.no_grad():
                scores.append(model(public_x[public_indices(job, version + 1)]))
        consensus = torch.stack(scores).mean(0)
    result = run(plan)
    assert torch.allclose(result.params_D.view(60, 10), consensus, atol=1e-4)
    for client, model in enumerate(models):
        assert type(result.models[client]) is type(model)
        for found, wanted in zip(result.models[client].parameters(), model.parameters(), strict=True):
            assert torch.allclose(found, wanted, atol=1e-4)


def test_every_round_asks_for_other_samples(plan: Plan) -> None:
    job = build_job(plan)
    draws = [public_indices(job, version) for version in range(3)]
    assert all(len(np.unique(draw)) == 60 for draw in draws)
    assert not np.array_equal(draws[0], draws[1])
    whole = build_job(plan.replace({"algorithm.samples": 10**6}))
    assert np.array_equal(public_indices(whole, 5), np.arange(job.num_public))


@pytest.mark.parametrize("bits", [0, 8])
def test_scores_travel_and_nothing_else(plan: Plan, bits: int) -> None:
    uplink = [{"name": "quantise", "bits": bits}] if bits else []
    last = run(plan.replace({"uplink": uplink})).history[-1]
    table = 60 * 10 * 4 + FRAME
    assert last["bytes_down"] == 3 * 5 * table
    if bits:
        assert 3 * 5 * 600 < last["bytes_up"] < 0.35 * 3 * 5 * table
    else:
        assert last["bytes_up"] == 3 * 5 * table
    per_client = build_job(plan).spec.num_params
    assert per_client == 600


def test_what_is_measured_is_the_mean_of_the_clients_own_models(plan: Plan, tmp_path: Path) -> None:
    plan = plan.replace({"evaluation.clients_every": 3})
    result = run(plan, out=tmp_path / "run", report=False)
    dataset = build_job(plan).federation.dataset
    x, y = torch.from_numpy(dataset.test_x).float() / 16, torch.from_numpy(dataset.test_y)
    with torch.no_grad():
        accuracies = [float((model(x).argmax(1) == y).float().mean()) for model in result.models.values()]
    last = result.history[-1]
    assert result.accuracy == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert last["models_test"]["mean"] == pytest.approx(result.accuracy, abs=1e-12)
    assert last["models_test"]["std"] == pytest.approx(np.std(accuracies), abs=1e-6)
    assert last["models_test"]["num_clients"] == len(result.models) == last["clients_test"]["num_clients"]
    assert last["clients_test"]["mean"] > result.accuracy  # at home they know the classes that occur
    assert "clients&#x27; own models" in write_report([tmp_path / "run"]).read_text()
    with pytest.raises(RunError, match=r"result\.models\[client\]"):
        _ = result.model
    few = run(plan.replace({"evaluation.max_clients": 2})).history[-1]
    assert few["models_test"]["num_clients"] == 2


def test_a_killed_run_ends_the_same_in_any_engine(plan: Plan, tmp_path: Path) -> None:
    """Error feedback and clients that take part now and then: all that they remember is in the checkpoint."""
    top_k = {"name": "top_k", "fraction": 0.2, "error_feedback": True}
    plan = plan.replace({"rounds": 6, "algorithm.samples": 1000, "uplink": [top_k], "evaluation.clients_every": 2})
    processes = {"name": "processes", "workers": 2}
    run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 4, "engine": processes}), out=tmp_path / "run", report=False)
    run(plan.replace({"engine": processes}), out=tmp_path / "run", report=False, resume=True)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_any_rule_and_any_device_will_do(plan: Plan) -> None:
    mean, median = (run(plan.replace({"aggregator": rule})).params_D for rule in ("mean", "median"))
    assert not torch.allclose(mean, median, atol=1e-3)
    slow = plan.replace({"devices": {"name": "stragglers", "fraction": 0.9}, "engine": "auto"})
    fast, late = run(plan).history[-1], run(slow).history[-1]
    assert late["samples_trained"] < fast["samples_trained"]


def test_samples_are_counted_on_both_sides(plan: Plan) -> None:
    """Two rounds of everybody: two passes over private data, one over 60 public samples, one over all with labels."""
    plan = plan.replace({"policy.size": 12, "rounds": 2, "algorithm.public_epochs": 1})
    job = build_job(plan)
    wanted = 2 * job.federation.dataset.num_train + 12 * 60 + 12 * job.num_public
    assert run(plan).history[-1]["samples_trained"] == wanted


def test_models_with_statistics_and_dropout_are_kept_whole(plan: Plan) -> None:
    plan = Plan(**{**plan.to_dict(), "models": [normed, dropped], "local": {"batch_size": 15, "lr": 0.1}})
    one, two = run(plan), run(plan)
    assert torch.equal(one.params_D, two.params_D)
    means = [dict(m.named_buffers())["norm.running_mean"] for c, m in one.models.items() if c % 2 == 0]
    assert len(means) > 1 and not torch.equal(means[0], means[1])


REFUSED = [
    ({"public": None}, "fedmd learns from public samples"),
    ({"policy": "buffered"}, 'policy = "cohort"'),
    ({"algorithm": "fedavg"}, "set model, not models"),
    ({"models": []}, "models is empty"),
    ({"server.lr": 0.5}, "leave server.lr"),
    ({"aggregator": "majority"}, "votes"),
    ({"local.buffers": "local"}, "leave local.buffers out"),
    ({"uplink": [{"name": "top_k", "fraction": 0.1, "error_feedback": True}]}, "error_feedback = false"),
    ({"algorithm.samples": 0}, "fedmd: algorithm.samples must be at least 1, got 0"),
    ({"models": ["logistic", {"name": "mlp_2nn", "num_classes": 12}]}, "equal outputs"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_cannot_be_right_is_refused(plan: Plan, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        build_job(plan.replace(changes))


def test_labels_are_not_taken_from_elsewhere(plan: Plan) -> None:
    elsewhere = {**plan.to_dict(), "public": upside_down}
    assert run(Plan(**elsewhere)).accuracy > 0
    with pytest.raises(PlanError, match="public_epochs needs labels"):
        build_job(Plan(**{**elsewhere, "algorithm": {"name": "fedmd", "public_epochs": 1}}))


def test_measures_need_a_shared_model(plan: Plan) -> None:
    with pytest.raises(PlanError, match="set algorithm to fedavg"):
        measure_plan(plan)


def test_clients_of_three_kinds_end_above_training_alone(plan: Plan) -> None:
    """Digits by Dirichlet(0.5), three architectures; alone is the same run without digesting. Every kind gains."""
    plan = plan.replace({"rounds": 8, "policy.size": 12, "local.epochs": 2, "evaluation.every": 0})
    plan = plan.replace({"algorithm.public_epochs": 5, "public.fraction": 0.2, "algorithm.samples": 300})
    dataset = build_job(plan).federation.dataset
    x, y = torch.from_numpy(dataset.test_x).float() / 16, torch.from_numpy(dataset.test_y)
    ends = []
    for epochs in (0, 3):
        models = run(plan.replace({"algorithm.epochs": epochs})).models
        with torch.no_grad():
            right = np.array([float((models[client](x).argmax(1) == y).float().mean()) for client in range(12)])
        ends.append(right.reshape(4, 3).mean(0))
    assert (ends[1] > ends[0] + 0.03).all()
    assert ends[1].mean() > ends[0].mean() + 0.06


def test_a_resumed_history_is_the_same(plan: Plan, tmp_path: Path) -> None:
    whole = run(plan)
    run(plan.replace({"rounds": 1}), out=tmp_path / "run", report=False)
    assert timeless(run(plan, out=tmp_path / "run", report=False, resume=True).history) == timeless(whole.history)
