"""Engines agree on models with dropout and batch norm, on clients of several versions, and on compiled steps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import dropped, normed
from members import every

from atoll.api import run
from atoll.core.messages import Broadcast, Task
from atoll.core.plan import Plan
from atoll.engine.base import rehearse
from atoll.engine.inline import inline
from atoll.engine.vectorised import vectorised
from atoll.train.build import build_job
from atoll.train.trainer import Trainer


def plan_with(base: Plan, **changes: Any) -> Plan:
    return Plan(**{**{name: getattr(base, name) for name in base.to_dict() if name != "stop"}, **changes})


def final(plan: Plan, engine: Any) -> torch.Tensor:
    return run(plan_with(plan, engine=engine)).params_D


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


@pytest.mark.parametrize("sampler", every("rounds.samplers"))
def test_a_sampler_remembers_what_it_needs(digits_plan: Plan, sampler: str, tmp_path: Path) -> None:
    plan = plan_with(digits_plan, sampler=sampler, rounds=6)
    whole = run(plan)
    run(plan_with(plan, rounds=3), out=tmp_path / "run", report=False)
    assert torch.equal(run(plan, out=tmp_path / "run", report=False, resume=True).params_D, whole.params_D)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"name": "processes", "workers": 2, "stack": 3, "compile": True}])
def test_workers_use_what_was_compiled_before_they_were_forked(
    digits_plan: Plan, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    """Compiling again in a worker takes long, or forever: the threads that compile are not forked."""
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    torch.set_num_threads(3)  # as in a process that does nothing else
    try:
        assert run(plan_with(digits_plan, engine=engine)).reason == "all rounds done"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["processes", "auto"])
def test_steps_are_recorded_and_timed_with_one_thread(
    digits_plan: Plan, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = import_module(f"atoll.engine.{name}")
    seen: list[int] = []

    def rehearsed(trainer: Trainer, steps: int) -> int:
        seen.append(torch.get_num_threads())
        return rehearse(trainer, steps)

    monkeypatch.setattr(module, "rehearse", rehearsed)
    torch.set_num_threads(2)
    try:
        plan = digits_plan.replace({"local.batch_size": 64})  # kernels are not timed for small batches
        engine = getattr(module, name)(build_job(plan), cohort=6, workers=1)
        engine.close()
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
