"""What each algorithm must show, on quadratics with a known optimum and on digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import normed, optimum, quadratic, quadratics

from atoll import Plan, run
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, Task
from atoll.engine.inline import inline
from atoll.train.build import build_job

BEST = optimum(quadratics())


def quadratic_plan(**settings: Any) -> Plan:
    plan = Plan(
        data=quadratics,
        partition="natural",
        model=quadratic,
        loss="helpers:first_output",
        local={"steps": 5, "batch_size": "all", "lr": 0.05},
        evaluation={"every": 0},
        engine={"name": "vectorised", "stack": 10},
    )
    return plan.replace({key.replace("__", "."): value for key, value in settings.items()})


def gap(plan: Plan) -> float:
    """How far a run ends from the optimum."""
    return float((run(plan).params_D - BEST).norm())


def test_one_step_of_all_clients_is_a_step_of_gradient_descent() -> None:
    plan = quadratic_plan(rounds=20, local__steps=1)
    centre, curvature = np.split(quadratics().train_x.astype(np.float64), 2, axis=1)
    w = np.zeros(4)
    for _ in range(20):
        w -= 0.05 * (curvature * (w - centre)).mean(0)
    assert np.abs(run(plan).params_D.numpy() - w).max() < 1e-12


def test_the_bias_of_fedavg_is_linear_in_the_extra_steps() -> None:
    """Fixed step size: it ends beside the optimum by about k * lr * (E - 1)."""
    amounts, gaps = [], []
    for lr, steps in [(0.01, 4), (0.02, 4), (0.01, 7), (0.02, 7), (0.005, 13)]:
        gaps.append(gap(quadratic_plan(rounds=200, local__steps=steps, local__lr=lr)))
        amounts.append(lr * (steps - 1))
    slope = np.polyfit(np.log(amounts), np.log(gaps), 1)[0]
    assert 0.9 < slope < 1.1
    assert gap(quadratic_plan(rounds=400, local__steps=1, local__lr=0.05)) < 1e-4 * min(gaps)


def test_with_inverse_time_decay_the_gap_falls_as_one_over_t() -> None:
    rounds = [25, 50, 100, 200]
    schedule = {"name": "inverse_time", "decay": 0.2}
    gaps = [gap(quadratic_plan(rounds=r, local__lr=0.1, local__schedule=schedule)) for r in rounds]
    slope = np.polyfit(np.log(rounds), np.log(gaps), 1)[0]
    assert slope < -0.9


def test_scaffold_reaches_the_optimum_exactly_with_half_the_clients() -> None:
    half = {"rounds": 100, "policy": {"name": "cohort", "size": 5}}
    assert gap(quadratic_plan(**half)) > 1e-3
    assert gap(quadratic_plan(**half, algorithm="scaffold")) < 1e-10


def test_feddyn_reaches_the_optimum_exactly() -> None:
    assert gap(quadratic_plan(rounds=200, algorithm={"name": "feddyn", "alpha": 0.5})) < 1e-8


def test_only_clients_that_took_part_are_remembered() -> None:
    """And a client's control variate is its gradient: (x - y) / (K lr)."""
    plan = quadratic_plan(algorithm="scaffold")
    job = build_job(plan)
    engine = inline(job)
    server = job.algorithm.init_server(job.first_D)
    sent = {0: Broadcast(job.first_D, job.algorithm.broadcast(job.first_D, server))}
    work = engine.train([Task(client, 0, 0) for client in (2, 7)], sent, {})
    assert sorted(work.states) == [2, 7]
    folded = torch.stack([work.states[client]["control"] for client in (2, 7)]).mean(0)
    moved_D = work.folded["delta"] / work.folded["weight"]
    assert torch.allclose(folded, -moved_D / (5 * 0.05), rtol=1e-10)


SAME_AS_FEDAVG = [
    {"name": "fedprox", "mu": 0.0},
    {"name": "qffl", "q": 0.0},
    {"name": "fedsam", "rho": 0.0},
    {"name": "fedavgm", "momentum": 0.0},
    {"name": "moon", "mu": 0.0},
]


@pytest.mark.parametrize("algorithm", SAME_AS_FEDAVG, ids=lambda part: part["name"])
def test_without_its_term_an_algorithm_is_fedavg(digits_plan: Plan, algorithm: dict[str, Any]) -> None:
    fedavg, other = run(digits_plan).params_D, run(digits_plan.replace({"algorithm": algorithm})).params_D
    assert (fedavg - other).abs().max() < 1e-6
    stronger = {key: value if key == "name" else 0.9 for key, value in algorithm.items()}
    assert (fedavg - run(digits_plan.replace({"algorithm": stronger})).params_D).abs().max() > 1e-4


def test_fednova_is_fedavg_for_equal_work_and_corrects_unequal_work(digits_plan: Plan) -> None:
    equal = digits_plan.replace({"local.epochs": None, "local.steps": 3})
    fedavg, fednova = (run(equal.replace({"algorithm": name})).params_D for name in ("fedavg", "fednova"))
    assert (fedavg - fednova).abs().max() < 1e-6
    assert not torch.allclose(run(digits_plan).params_D, run(digits_plan.replace({"algorithm": "fednova"})).params_D)
    with pytest.raises(PlanError, match="plain steps"):
        run(digits_plan.replace({"algorithm": "fednova", "local.optimizer": {"name": "sgd", "momentum": 0.9}}))


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_servers_follow_their_equations(digits_plan: Plan, name: str) -> None:
    one, two = (digits_plan.replace({"rounds": n, "algorithm": name}) for n in (1, 2))
    first_D = build_job(one).first_D
    delta_D = run(digits_plan.replace({"rounds": 1})).params_D - first_D
    beta1 = 0.0 if name == "fedadagrad" else 0.9
    tau, square_D = 1e-3, delta_D**2
    second_D = {
        "fedadam": 0.99 * tau**2 + 0.01 * square_D,
        "fedyogi": tau**2 - 0.01 * square_D * torch.sign(tau**2 - square_D),
        "fedadagrad": tau**2 + square_D,
    }[name]
    lr = 0.1 if name == "fedadagrad" else 0.03
    wanted_D = first_D + lr * (1 - beta1) * delta_D / (second_D.sqrt() + tau)
    assert torch.allclose(run(one).params_D, wanted_D, atol=1e-6)
    assert not torch.equal(run(two).params_D, run(one).params_D)
    other = run(one.replace({"server.lr": 2 * lr})).params_D - first_D
    assert torch.allclose(other, 2 * (wanted_D - first_D), atol=1e-6)


def test_fedexp_steps_further_where_clients_disagree() -> None:
    """On quadratics whose clients pull apart, the step is half the ratio of mean square and squared mean."""
    plan = quadratic_plan(rounds=1)
    delta_D = run(plan).params_D
    job = build_job(plan.replace({"algorithm": "fedexp"}))
    work = inline(job).train([Task(client, 0, 0) for client in range(10)], {0: Broadcast(job.first_D, {})}, {})
    square = float(work.folded["aux.square"] / work.folded["weight"])
    step = square / (2 * (float(delta_D.square().sum()) + 1e-3))
    assert step > 1.5
    found = run(plan.replace({"algorithm": "fedexp"})).params_D
    assert torch.allclose(found, step * delta_D, rtol=1e-6)


@pytest.mark.parametrize("algorithm", [{"name": "qffl", "q": 2.0}, {"name": "afl", "step": 0.01}], ids=["qffl", "afl"])
def test_fair_rules_help_the_worst_client(algorithm: dict[str, Any]) -> None:
    """On quadratics of known loss: the worst client fares better, and the mean client worse, than at the optimum."""
    centre, curvature = (
        torch.from_numpy(part) for part in np.split(quadratics().train_x.astype(np.float64), 2, axis=1)
    )

    def losses(params_D: torch.Tensor) -> torch.Tensor:
        return (0.5 * curvature * (params_D - centre) ** 2).sum(1)

    found = losses(run(quadratic_plan(rounds=200, local__steps=1, algorithm=algorithm)).params_D)
    best = losses(BEST)
    assert found.max() < 0.9 * best.max()
    assert found.mean() > best.mean()


def test_fedsam_trains_models_with_averaged_statistics(digits_plan: Plan) -> None:
    result = run(Plan(**{**digits_plan.to_dict(), "model": normed, "algorithm": "fedsam", "rounds": 1}))
    assert result.params_D.isfinite().all()


def test_moon_needs_a_linear_layer() -> None:
    with pytest.raises(PlanError, match=r"nn\.Linear"):
        run(quadratic_plan(algorithm="moon", engine="inline"))
