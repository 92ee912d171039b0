"""Privacy where clients have models of their own: what leaves is accounted for, and what stays is trained as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll import Plan, run
from atoll.api import Result
from atoll.core.client_work import Trained
from atoll.core.errors import PlanError
from atoll.core.messages import KEPT, Task
from atoll.engine.base import InProcess
from atoll.privacy.grid import LEVELS
from atoll.train.build import build_job
from atoll.train.exchange import sent_by
from atoll.train.job import broadcast_of
from atoll.train.trainer import Trainer

NOISE = {"clip": 0.5, "sigma": 1.0, "delta": 1e-4, "test_noise": True}
MECHANISMS: dict[str, dict[str, Any]] = {
    "central": {"sampler": {"name": "poisson", "rate": 0.5}, "privacy": {"name": "central", **NOISE}},
    "distributed": {"sampler": "round_robin", "privacy": {"name": "distributed", **NOISE}, "secagg": {}},
    "local": {"sampler": "uniform", "privacy": {"name": "local", **NOISE}},
}
ASK_FOR_GRADIENTS = ("ditto", "apfl", "pfedme", "per_fedavg", "interpolation")
KEEP = ("fedper", "fedrep", "lg_fedavg")


def plan_of(algorithm: Any, **changes: Any) -> Plan:
    base = Plan(
        partition={"name": "iid", "num_clients": 12},
        policy={"size": 6},
        model={"name": "mlp_2nn", "hidden": 8},
        local={"steps": 2, "batch_size": 8},
        rounds=2,
        engine="inline",
        algorithm=algorithm,
    )
    return base.replace({**({"evaluation.validation": 0.2} if algorithm == "interpolation" else {}), **changes})


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_round_costs_what_it_costs_without_own_models(mechanism: str) -> None:
    costs = {
        name: run(plan_of(name, **MECHANISMS[mechanism])).history[-1]["privacy"]
        for name in ("fedavg", "fedper", "lg_fedavg", "ditto", "mean_regularised")
    }
    assert 0 < costs["fedavg"]["epsilon"] < 100
    assert all(cost == costs["fedavg"] for cost in costs.values())


@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.05), (1.0, 0.5), (1e4, 1e-6)])
def test_the_clip_bounds_what_is_shared_and_that_alone(scale: float, share: float) -> None:
    """With a clip just above the length of what is shared nothing is cut, although the kept part moves as far again."""
    plan = plan_of("fedper", **MECHANISMS["central"])
    trained, kept_K = trained_from(plan, scale)
    norm = float(trained.update.delta_D.norm())
    assert float((trained.state[KEPT] - kept_K).norm()) > 0.5 * min(norm, 1.0)
    job = build_job(plan.replace({"privacy.clip": share * norm}))
    assert job.mechanism is not None and job.mechanism.on_grid is not None
    on_grid = job.mechanism.on_grid(trained.update.alone(), sent_by(job, [Task(0, 0, 0)]))
    assert not on_grid.aux and on_grid.delta_D.shape == (1, 592)
    assert float(on_grid.delta_D.double().norm()) / LEVELS == pytest.approx(min(1.0, 1 / share), abs=1e-4)


def trained_from(plan: Plan, scale: float) -> tuple[Trained, torch.Tensor]:
    """Return what a client trains from kept parameters that are so many times the first ones, and those."""
    job = build_job(plan)
    kept_K = scale * job.first_kept_K
    return Trainer(job).train_one(Task(0, 0, 0), broadcast_of(job, job.first_D, {}), {KEPT: kept_K}), kept_K


def test_own_models_are_trained_without_noise() -> None:
    """An own model that is not pulled to the shared one is that of a run without noise, to the bit."""
    everybody = {"sampler": {"name": "poisson", "rate": 1.0}, "policy": {"size": 12}}
    private = run(plan_of({"name": "ditto", "lam": 0.0}, **{**MECHANISMS["central"], **everybody}))
    open_run = run(plan_of({"name": "ditto", "lam": 0.0}, **everybody))
    assert not torch.equal(private.params_D, open_run.params_D)
    assert_same_models(private, open_run)


@pytest.mark.parametrize(
    "change", [MECHANISMS["central"], {"attack": "large_norm", "attackers": {"num": 2}}], ids=["noise", "attack"]
)
def test_who_trains_alone_is_not_moved_by_others(change: dict[str, Any]) -> None:
    """Also those who first take part after noise or an attacker could have moved the shared model."""
    moved, alone = run(plan_of("local", **change)), run(plan_of("local"))
    assert torch.equal(moved.params_D, alone.params_D)
    late = run(plan_of("local", **{**change, "policy": {"size": 3}, "rounds": 6}))
    first = build_job(plan_of("local")).first_D
    assert torch.equal(late.params_D, first)


def assert_same_models(one: Result, other: Result) -> None:
    assert sorted(one.models) == sorted(other.models) == list(range(12))
    for client, model in one.models.items():
        theirs = other.models[client].state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


REFUSED = {
    **dict.fromkeys(ASK_FOR_GRADIENTS, "asks for the plain gradient of a batch, which nothing protects"),
    **dict.fromkeys(KEEP, "is trained without noise and steers later gradients"),
    "ifca": "choose a cluster by the losses on their samples and say which",
}


@pytest.mark.parametrize("algorithm", REFUSED)
@pytest.mark.parametrize("mechanism", ["sample", "proportional"])
def test_private_steps_refuse_what_they_do_not_protect(
    algorithm: str, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(InProcess, "works", lambda *args: begun.append(True) or [])
    noise = {"name": "sample", **NOISE}
    if mechanism == "proportional":
        noise = {"name": "proportional", "noise": 3.0, "epsilon": 50.0, "delta": 1e-4}
    with pytest.raises(PlanError, match=REFUSED[algorithm]) as refused:
        run(plan_of(algorithm, privacy=noise))
    assert "central" in str(refused.value) or "use another algorithm" in str(refused.value)
    assert not begun


@pytest.mark.parametrize("algorithm", ["mean_regularised", "fine_tuning", "local"])
def test_private_steps_protect_own_models_that_are_made_by_them(algorithm: str) -> None:
    private = plan_of(algorithm, privacy={"name": "sample", **NOISE})
    costs = [run(each).history[-1]["privacy"] for each in (private, private.replace({"algorithm": "fedavg"}))]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clusters_are_told_exactly_and_so_not_in_private(mechanism: str) -> None:
    with pytest.raises(PlanError, match="but members must arrive exactly") as refused:
        run(plan_of("ifca", **MECHANISMS[mechanism]))
    assert refused.value.rule == "private-exact-numbers"
