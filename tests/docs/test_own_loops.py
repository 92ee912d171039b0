"""Loops of one's own as client work: the examples run, and PyTorch through plain functions gives the native bits."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Plan, run
from atoll.core.client_work import ClientWork
from atoll.train.array_work import Arrays, ArrayTask, Result, array_work
from atoll.train.build import build_job

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_loops"


def accuracy_of(name: str, **options: int) -> float:
    return float(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options))


@pytest.mark.parametrize(("rounds", "accuracy"), [(4, 0.8), pytest.param(20, 0.88, marks=pytest.mark.slow)])
def test_scikit_learn(rounds: int, accuracy: float) -> None:
    assert accuracy_of("sklearn_sgd", rounds=rounds) >= accuracy


def test_a_loop_with_gradient_accumulation() -> None:
    assert accuracy_of("torch_loop") >= 0.85


def test_jax() -> None:
    pytest.importorskip("jax")
    assert accuracy_of("jax_softmax") >= 0.85


PLAN = Plan(
    model={"name": "mlp_2nn", "hidden": 16},
    partition={"name": "dirichlet", "num_clients": 6, "alpha": 0.5, "min_samples": 5},
    local={"lr": 0.1, "batch_size": 16, "epochs": 2},
    rounds=3,
    engine="inline",
)


def by_hand() -> ClientWork:
    """Train the plan's model by a loop that is written out."""
    job = build_job(PLAN)
    names = {slot.name.replace(".", "_"): slot.name for slot in job.spec.slots}

    def loaded(arrays: Arrays) -> nn.Module:
        job.model.load_state_dict({names[name]: torch.from_numpy(value) for name, value in arrays.items()})
        return job.model

    def first(dataset: Any) -> Arrays:
        views = job.spec.views(job.first_D)
        return {short: views[name].numpy() for short, name in names.items()}

    def train(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Result:
        model, x, y = loaded(arrays), torch.from_numpy(task.x), torch.from_numpy(task.y)
        losses = []
        for batch in task.batches():
            each = -model(x[batch]).log_softmax(-1).gather(-1, y[batch][:, None]).squeeze(-1)
            loss = (each * torch.full((len(batch),), 1 / len(batch))).sum()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.addcmul_(parameter.grad, torch.tensor(-task.lr))
            losses.append(float(loss.detach()))
        state = model.state_dict()
        return {short: state[name].numpy().copy() for short, name in names.items()}, len(y), {"loss": np.mean(losses)}

    return array_work(first=first, train=train, evaluate=lambda arrays, task: {})


def test_torch_through_plain_functions_gives_the_bits_of_the_native_loop() -> None:
    native = run(PLAN)
    own = run(Plan(**{**PLAN.to_dict(), "model": PLAN.model, "work": by_hand}))
    assert torch.equal(own.params_D, native.params_D)
    assert [row["train_loss"] for row in own.history] == pytest.approx([row["train_loss"] for row in native.history])


@pytest.mark.parametrize("engine", [{"name": "processes", "workers": 1}, {"name": "processes", "workers": 2}], ids=str)
def test_workers_give_the_same_bits(engine: dict[str, Any]) -> None:
    own = {**PLAN.to_dict(), "work": by_hand}
    assert torch.equal(run(Plan(**{**own, "engine": engine})).params_D, run(Plan(**own)).params_D)
