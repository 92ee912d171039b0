"""Engines agree, workers do not matter, the order of clients does not matter, and a stopped run ends the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import dropped, normed, timeless

from atoll.api import run
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part, members
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.engine.vectorised import vectorised
from atoll.train.job import build_job

OPTIMIZERS = ["sgd", {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-3}, "adam"]


def fixed(algorithm: str) -> Mapping[str, object]:
    """The local settings that an algorithm insists on."""
    settings: Mapping[str, object] = Part(algorithm).build("algorithms").local
    return settings


def plan_with(base: Plan, **changes: Any) -> Plan:
    return Plan(**{**{name: getattr(base, name) for name in base.to_dict() if name != "stop"}, **changes})


def algorithm_plan(base: Plan, algorithm: str, **changes: Any) -> Plan:
    """The base plan with another algorithm, and with the public samples and several models that it is made for."""
    built = Part(algorithm).build("algorithms")
    public = {"public": {"name": "held_out", "fraction": 0.1}} if built.needs_public else {}
    models = {"models": ["logistic", {"name": "mlp_2nn", "hidden": 16}]} if built.scores else {}
    return plan_with(base, algorithm=algorithm, **public, **models, **changes)


def final(plan: Plan, engine: Any) -> torch.Tensor:
    return run(plan_with(plan, engine=engine)).params_D


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [(a, o) for a in members("algorithms") for o in OPTIMIZERS if o == "sgd" or "optimizer" not in fixed(a)],
)
def test_stacked_equals_one_by_one(digits_plan: Plan, algorithm: str, optimizer: Any) -> None:
    batch = None if algorithm == "fedsgd" else 16
    local = {"lr": 0.01 if optimizer == "adam" else 0.1, "optimizer": optimizer, "batch_size": batch}
    plan = algorithm_plan(digits_plan, algorithm, local=local)
    one_by_one = final(plan, "inline")
    together = final(plan, {"name": "vectorised", "stack": 3})
    assert (one_by_one - together).abs().max() < 2e-5
    assert (one_by_one - build_job(plan).first_D).abs().max() > 1e-3


@pytest.mark.parametrize("algorithm", members("algorithms"))
def test_any_number_of_workers_gives_the_same_bits(digits_plan: Plan, algorithm: str) -> None:
    local = {"lr": 0.1} if algorithm == "fedsgd" else {"lr": 0.1, "batch_size": 16}
    plan = algorithm_plan(digits_plan, algorithm, local=local, policy={"size": 7})
    ends = [final(plan, {"name": "processes", "workers": n, "stack": 2}) for n in (1, 2, 3)]
    ends.append(final(plan, {"name": "vectorised", "stack": 2}))
    assert all(torch.equal(ends[0], end) for end in ends)


@pytest.mark.parametrize("engine", ["inline", "vectorised"])
@pytest.mark.parametrize("algorithm", members("algorithms"))
def test_the_order_of_clients_changes_nothing(digits_plan: Plan, algorithm: str, engine: str) -> None:
    local = {"lr": 0.1} if algorithm == "fedsgd" else {"lr": 0.1, "batch_size": 16}
    job = build_job(algorithm_plan(digits_plan, algorithm, local=local))
    worker = inline(job) if engine == "inline" else vectorised(job, stack=3)
    server = job.algorithm.init_server(job.first_D)
    sent = {0: Broadcast(job.first_D, job.algorithm.broadcast(job.first_D, server))}
    tasks = [Task(client, 0, 0) for client in (3, 1, 7, 11, 0)]
    forth, back = worker.train(tasks, sent, {}), worker.train(tasks[::-1], sent, {})
    assert torch.equal(forth.folded["delta"], back.folded["delta"])
    worker.close()


def test_dropout_is_the_same_stacked_or_not(digits_plan: Plan) -> None:
    plan = plan_with(digits_plan, model=dropped)
    one_by_one, together = final(plan, "inline"), final(plan, {"name": "vectorised", "stack": 5})
    assert (one_by_one - together).abs().max() < 2e-5
    plain = final(plan_with(plan, model={"name": "mlp_2nn", "hidden": 20}), "inline")
    assert plain.shape != one_by_one.shape  # another model altogether: the comparison above is not trivial


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_batch_norm_trains_in_every_engine(digits_plan: Plan, buffers: str) -> None:
    local = {"lr": 0.1, "batch_size": 16, "buffers": buffers}
    plan = plan_with(digits_plan, model=normed, local=local, rounds=4, policy={"size": 12})
    inline_end = final(plan, "inline")
    assert torch.equal(inline_end, final(plan, {"name": "processes", "workers": 2, "stack": 4}))
    result = run(plan)
    assert result.accuracy > 0.5
    mean = dict(result.model.named_buffers())["norm.running_mean"]
    assert bool(mean.any()) == (buffers == "average")


def test_clients_on_different_versions_train_together(digits_plan: Plan) -> None:
    """Asynchronous rounds: each client starts from the version that it was sent."""
    job = build_job(plan_with(digits_plan, algorithm={"name": "fedprox", "mu": 0.1}))
    sent = {0: Broadcast(job.first_D, {}), 1: Broadcast(job.first_D * 1.5, {})}
    tasks = [Task(client, client % 2, client) for client in range(4)]
    one_by_one = inline(job).train(tasks, sent, {}).folded["delta"]
    together = vectorised(job, stack=4).train(tasks, sent, {}).folded["delta"]
    assert (one_by_one - together).abs().max() / one_by_one.abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_compiled_equals_recorded(digits_plan: Plan, algorithm: str) -> None:
    plan = plan_with(digits_plan, algorithm=algorithm)
    recorded, compiled = (final(plan, {"name": "vectorised", "stack": 3, "compile": c}) for c in (False, True))
    assert (recorded - compiled).abs().max() < 2e-5


@pytest.mark.parametrize("sampler", members("rounds.samplers"))
def test_a_sampler_remembers_what_it_needs(digits_plan: Plan, sampler: str, tmp_path: Path) -> None:
    plan = plan_with(digits_plan, sampler=sampler, rounds=6)
    whole = run(plan)
    run(plan_with(plan, rounds=3), out=tmp_path / "run")
    assert torch.equal(run(plan, out=tmp_path / "run", resume=True).params_D, whole.params_D)


@pytest.mark.parametrize("algorithm", members("algorithms"))
def test_resume_equals_uninterrupted(digits_plan: Plan, algorithm: str, tmp_path: Path) -> None:
    local = {"lr": 0.1} if algorithm == "fedsgd" else {"lr": 0.1, "batch_size": 16}
    plan = algorithm_plan(digits_plan, algorithm, local=local, rounds=6, uplink=[{"name": "clip", "norm": 1.0}])
    whole = run(plan)
    run(plan_with(plan, rounds=2), out=tmp_path / "run")
    resumed = run(plan, out=tmp_path / "run", resume=True)
    assert torch.equal(whole.params_D, resumed.params_D)
    assert timeless(resumed.history) == timeless(whole.history)
