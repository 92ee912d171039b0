"""Private steps as they run: batches, noise on what is released, engines, and going on after a stop."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import convolutions, dropped, grouped, timeless
from scipy import stats

from atoll import Plan, run
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part
from atoll.core.privacy import Exposure
from atoll.engine.base import Engine
from atoll.engine.inline import inline
from atoll.engine.vectorised import vectorised
from atoll.privacy.noise import fresh_secret, narrow_gaussian
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.job import Job
from atoll.train.private import SENSITIVITY, grid_of

PRIVACY = {"name": "sample", "clip": 1.0, "sigma": 0.3, "delta": 1e-5, "test_noise": True}


def plan_of(**changes: Any) -> Plan:
    fields = {
        "partition": {"name": "dirichlet", "num_clients": 12, "alpha": 0.5},
        "model": {"name": "mlp_2nn", "hidden": 16},
        "policy": {"size": 3},
        "local": {"lr": 0.1, "batch_size": 16, "steps": 4},
        "rounds": 2,
        "privacy": PRIVACY,
        "engine": "inline",
    }
    return Plan(**{**fields, **changes})


def final(plan: Plan, engine: Any) -> torch.Tensor:
    return run(Plan(**{**vars(plan), "engine": engine})).params_D


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": {"name": "fedprox", "mu": 0.1}, "local": {"lr": 0.1, "batch_size": 16, "epochs": 1}},
        {"algorithm": "scaffold"},
        {"algorithm": "feddyn"},
        {"algorithm": "moon"},
        {"local": {"lr": 0.1, "batch_size": 16, "steps": 4, "optimizer": {"name": "sgd", "momentum": 0.9}}},
        {"local": {"lr": 0.01, "batch_size": 16, "steps": 4, "optimizer": "adam"}},
        {"local": {"lr": 0.1, "batch_size": "all", "epochs": 2}},
        {"local": {"lr": 0.1, "batch_size": 1, "steps": 6}},
        {"model": convolutions},
        {"model": grouped},
        {"model": dropped},
        {"devices": {"name": "stragglers", "fraction": 0.5}, "model": "logistic"},
        {"privacy": {"name": "proportional", "noise": 0.5, "epsilon": 8.0, "delta": 1e-5, "test_noise": True}},
    ],
)
def test_engines_agree_on_private_steps(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    one_by_one = final(plan, "inline")
    assert (one_by_one - final(plan, {"name": "vectorised", "stack": 3})).abs().max() < 2e-5
    assert (one_by_one - final(Plan(**{**vars(plan), "privacy": None}), "inline")).abs().max() > 1e-3


def test_private_steps_do_not_depend_on_workers_nor_on_stacking() -> None:
    plan = plan_of()
    alone = final(plan, {"name": "vectorised", "stack": 1})
    assert torch.equal(alone, final(plan, {"name": "processes", "workers": 2, "stack": 1}))
    assert (alone - final(plan, "inline")).abs().max() < 2e-5


def test_batches_are_poisson_samples() -> None:
    """Every sample by a coin of its own: sizes, and how often each sample comes, have the right mean and variance."""
    plan = plan_of(partition={"name": "iid", "num_clients": 4}, local={"batch_size": 30, "steps": 400})
    job = build_job(plan)
    indices = job.federation.train_indices(1)
    rate = 30 / len(indices)
    batches = client_batches(job, Task(1, 0, 0))
    held = np.stack([np.isin(indices, batch) for batch in batches])  # steps x samples
    sizes = held.sum(1)
    assert [len(batch) for batch in batches] == sizes.tolist()
    assert sizes.mean() == pytest.approx(30, abs=5 * math.sqrt(30 * (1 - rate) / 400))
    assert sizes.var() == pytest.approx(30 * (1 - rate), rel=5 * math.sqrt(2 / 400))
    spread = ((held.sum(0) - 400 * rate) ** 2 / (400 * rate * (1 - rate))).sum()
    assert stats.chi2.sf(spread, len(indices)) > 1e-3
    assert stats.chi2.cdf(spread, len(indices)) > 1e-3
    centred = held - rate
    for lag in (1, 2):
        together = (centred[lag:] * centred[:-lag]).sum() / (rate * (1 - rate) * math.sqrt(centred[lag:].size))
        assert abs(together) < 4
    for other in (Task(1, 0, 1), Task(0, 0, 0)):
        again = client_batches(job, other)
        assert not all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_batches_do_not_follow_from_the_seed() -> None:
    plan = plan_of(privacy={**PRIVACY, "test_noise": False})
    first, second = (client_batches(build_job(plan), Task(0, 0, 0)) for _ in range(2))
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    secret = fresh_secret()
    third, fourth = (client_batches(build_job(plan, secret=secret), Task(0, 0, 0)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(third, fourth, strict=True))
    tests = [build_job(plan_of(privacy=PRIVACY, seed=seed)).secret for seed in (1, 1, 2)]
    assert tests[0] == tests[1] != tests[2]


def released_noise(engine: Engine, job: Job, attempts: int) -> np.ndarray:
    """What one step of learning rate 1 moved the model by beyond its clipped sum, in steps of the grid (A, C, D)."""
    params_D = job.first_D
    quiet = replace(job, mechanism=job.mechanism._replace(steps=job.private._replace(sigma=1e-30)))  # type: ignore[union-attr]
    noise = np.empty((attempts, job.federation.num_clients, job.spec.num_params))
    for attempt in range(attempts):
        for client in range(job.federation.num_clients):
            task = [Task(client, 0, attempt)]
            weight = job.federation.num_samples(client)
            engine.trainer.rebind(job)
            delta_D = engine.train(task, {0: Broadcast(params_D, {})}, {}).folded["delta"] / weight
            engine.trainer.rebind(quiet)
            exact_D = engine.train(task, {0: Broadcast(params_D, {})}, {}).folded["delta"] / weight
            size = min(job.batch_size, weight)
            noise[attempt, client] = (exact_D - delta_D).double() * size / grid_of(job)
    engine.trainer.rebind(job)
    return noise


@pytest.mark.parametrize("engine", [inline, vectorised])
def test_releases_contain_the_charged_noise(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise on released updates: whole steps of the grid, the right variance and shape, nothing shared."""
    privacy = {**PRIVACY, "sigma": 1.5}
    plan = plan_of(partition={"name": "iid", "num_clients": 3}, model="logistic", privacy=privacy)
    job = build_job(Plan(**{**vars(plan), "local": {"lr": 1.0, "batch_size": 16, "steps": 1}}))
    job = replace(job, first_D=torch.zeros_like(job.first_D))
    monkeypatch.setattr(
        "atoll.train.private.narrow_gaussian",
        lambda key, sigma, num: np.zeros(num, np.int32) if sigma < 1 else narrow_gaussian(key, sigma, num),
    )
    noise_ACD = released_noise(engine(job), job, 12)
    assert np.abs(noise_ACD - noise_ACD.round()).max() < 0.1
    deviation = 1.5 * (SENSITIVITY + grid_of(job) * math.sqrt(job.spec.num_trainable)) / grid_of(job)
    flat = noise_ACD.ravel()
    assert flat.var() == pytest.approx(deviation**2, rel=5 * math.sqrt(2 / flat.size))
    cuts = stats.norm.ppf(np.arange(1, 40) / 40) * deviation
    assert stats.chisquare(np.bincount(np.searchsorted(cuts, flat), minlength=40)).pvalue > 1e-3
    rows = noise_ACD.reshape(-1, noise_ACD.shape[-1]) / deviation
    products = (rows @ rows.T)[np.triu_indices(len(rows), 1)] / math.sqrt(rows.shape[1])
    assert np.abs(products).max() < 5, "two releases share noise"
    assert products.var() == pytest.approx(1, abs=0.25)


def test_steps_of_one_task_have_noise_of_their_own() -> None:
    """With nothing but noise, the sum of S steps has S times the variance of one."""
    plan = plan_of(partition={"name": "iid", "num_clients": 3}, model="logistic")
    base = build_job(Plan(**{**vars(plan), "local": {"lr": 1e-3, "batch_size": 1, "steps": 25}}))
    base = replace(base, mechanism=base.mechanism._replace(steps=base.private._replace(sigma=200.0)))  # type: ignore[union-attr]
    sent = {0: Broadcast(base.first_D, {})}
    delta_D = inline(base).train([Task(0, 0, 0)], sent, {}).folded["delta"] / base.federation.num_samples(0)
    expected = 25 * (1e-3 * 200 * SENSITIVITY) ** 2
    assert float(delta_D.var()) == pytest.approx(expected, rel=5 * math.sqrt(2 / len(delta_D)))


def test_a_resumed_run_takes_the_same_private_steps(tmp_path: Path) -> None:
    plan = plan_of(rounds=4)
    whole = run(plan)
    run(Plan(**{**vars(plan), "rounds": 2}), out=tmp_path / "run", report=False)
    resumed = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(whole.params_D, resumed.params_D)
    assert timeless(resumed.history) == timeless(whole.history)


def test_two_runs_differ_unless_the_noise_is_for_tests() -> None:
    plan = plan_of(rounds=1, privacy={**PRIVACY, "test_noise": False})
    assert not torch.equal(run(plan).params_D, run(plan).params_D)


@pytest.mark.parametrize("engine", ["inline", {"name": "vectorised", "stack": 3}])
def test_an_algorithm_that_asks_for_the_plain_gradient_is_refused(engine: Any) -> None:
    with pytest.raises(PlanError, match="plain gradient"):
        run(plan_of(algorithm="fedsam", engine=engine))


def test_it_learns() -> None:
    plan = plan_of(
        partition={"name": "iid", "num_clients": 1},
        policy={"size": 1},
        model="logistic",
        local={"lr": 2.0, "batch_size": 200, "steps": 60},
        privacy={**PRIVACY, "sigma": 1.0},
        rounds=1,
        engine="vectorised",
    )
    assert run(plan).accuracy > 0.85


@pytest.mark.parametrize(("sigma", "epochs", "epsilon"), [(1.3, 15, 0.92), (1.1, 60, 2.50)])
def test_the_event_counts_all_steps(sigma: float, epochs: int, epsilon: float) -> None:
    """MNIST, B = 240, by Renyi divergences; published as 1.16 and 2.91 with an older conversion."""
    from dp_accounting.rdp import RdpAccountant

    mechanism = Part("sample", clip=1.0, sigma=sigma, delta=1e-5).build("privacy.mechanisms")
    exposure = Exposure("all", 1.0, epochs, 240 / 60_000, 250)
    event = mechanism.event(exposure)
    assert event.count == 250 * epochs
    assert RdpAccountant().compose(event).get_epsilon(1e-5) == pytest.approx(epsilon, abs=0.005)
