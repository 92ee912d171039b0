"""A clip in proportion to the client's own gradient: lambda meets the budget, and the report says what is open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import Plan, run
from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Broadcast, Task
from atoll.core.privacy import Exposure
from atoll.engine.inline import inline
from atoll.privacy.mechanisms.proportional import proportional
from atoll.train import private
from atoll.train.build import build_job
from atoll.train.job import Job

EXPOSURE = Exposure("every round", 1.0, 10, 0.05, 20)


def job_with(noise: float = 0.5, epsilon: float = 8.0, **changes: Any) -> Job:
    privacy = {"name": "proportional", "noise": noise, "epsilon": epsilon, "delta": 1e-5, "test_noise": True}
    local = {"lr": 1.0, "batch_size": "all", "steps": 1}
    plan = {"partition": {"name": "iid", "num_clients": 4}, "model": "logistic", "local": local, "rounds": 6}
    return build_job(Plan(**{**plan, "privacy": privacy, **changes}))


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_lambda_is_solved_for_the_budget(epsilon: float) -> None:
    from dp_accounting.rdp import RdpAccountant

    mechanism = proportional(noise=0.5, epsilon=epsilon, delta=1e-5, exposure=EXPOSURE)
    spent = RdpAccountant().compose(mechanism.event(EXPOSURE)).get_epsilon(1e-5)
    assert 0.98 * epsilon < spent <= epsilon
    assert mechanism.steps is not None
    assert mechanism.steps.share * mechanism.steps.sigma == pytest.approx(0.5)
    tighter = proportional(noise=0.5, epsilon=epsilon / 2, delta=1e-5, exposure=EXPOSURE)
    assert tighter.steps is not None
    assert tighter.steps.share < mechanism.steps.share, "less budget takes a smaller clip"


def test_the_budget_is_for_what_the_plan_runs() -> None:
    few, many = job_with(), job_with(rounds=24)
    assert few.private is not None
    assert many.private is not None
    assert many.private.sigma > few.private.sigma
    assert many.private.share < few.private.share


def test_a_run_cannot_be_resumed_for_more_rounds_than_its_noise_covers(tmp_path: Path) -> None:
    """Resumed for more rounds, the rounds before would be accounted for with noise that they did not have."""
    privacy = {"name": "proportional", "noise": 3.0, "epsilon": 8.0, "delta": 1e-5}
    plan = Plan(partition={"num_clients": 4}, privacy=privacy, sampler="poisson", rounds=1, engine="inline")
    run(plan, out=tmp_path / "run", report=False)
    with pytest.raises(RunError, match="resume it with its own plan"):
        run(plan.replace({"rounds": 2}), out=tmp_path / "run", report=False, resume=True)


def test_the_statement_names_what_is_not_protected() -> None:
    mechanism = proportional(noise=0.5, epsilon=8.0, delta=1e-5, exposure=EXPOSURE)
    assert "lengths of its mean gradients" in mechanism.neighbours
    assert mechanism.assumptions[0].startswith("NOT PROTECTED")
    for option in ({"noise": 0.0}, {"epsilon": 0.0}, {"delta": 1.0}):
        with pytest.raises(PlanError, match=next(iter(option))):
            proportional(**{"noise": 0.5, "epsilon": 8.0, "delta": 1e-5, "exposure": EXPOSURE, **option})  # type: ignore[arg-type]


def one_step(job: Job, client: int) -> torch.Tensor:
    """What one step of learning rate 1 on all samples moves the model by."""
    done = inline(job).train([Task(client, 0, 0)], {0: Broadcast(job.first_D, {})}, {})
    return done.folded["delta"] / job.federation.num_samples(client)


def test_clip_and_noise_follow_the_gradient_of_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise the sum is that of gradients clipped to lambda |g|; with noise its deviation is a share of |g|."""
    noisy = job_with(noise=200.0)
    job = replace(noisy, mechanism=noisy.mechanism._replace(steps=noisy.private._replace(share=0.8)))  # type: ignore[union-attr]
    assert job.private is not None
    drawn = private.noise_of
    for client in range(3):
        indices = torch.from_numpy(job.federation.train_indices(client))
        x, y = job.federation.features(job.federation.train_x[indices]), job.federation.train_y[indices]
        leaves = {name: value.clone() for name, value in job.spec.views(job.first_D).items()}

        def grads_of(x: torch.Tensor, y: torch.Tensor, leaves: dict[str, torch.Tensor] = leaves) -> torch.Tensor:
            rows = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
            loss = job.loss(torch.func.functional_call(job.model, rows, (x,)), y).sum()
            return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(rows.values()))])

        each = torch.stack([grads_of(x[i : i + 1], y[i : i + 1]) for i in range(len(y))])
        length = float(each.mean(0).norm())
        clip = 0.8 * length
        assert each.norm(dim=1).max() > clip
        wanted = (each * (clip / each.norm(dim=1).clamp(min=clip)).unsqueeze(1)).sum(0) / len(y)
        monkeypatch.setattr("atoll.train.loop.noise_of", lambda job, task, step: 0 * drawn(job, task, step))
        assert (one_step(job, client) + wanted).abs().max() < 1e-6
        monkeypatch.setattr("atoll.train.loop.noise_of", drawn)
        noise = one_step(job, client) + wanted
        deviation = job.private.sigma * clip / len(y)
        assert float(noise.std()) == pytest.approx(deviation, rel=0.15)
