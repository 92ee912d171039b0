"""What the server's seat sees, against the gradients of the clients behind each row, over many kinds of plans.

Clients take one step on all their samples, so that an honest update is -lr times a gradient, which is computed here
from the truth and from the model that was seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.random_plans import random_plan
from torch import Tensor

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.core.probe import Sight
from atoll.simulation.seat import Truth, Watched, samples_of, watch

PLAN = Plan(
    model={"name": "mlp_2nn", "hidden": 8},
    partition={"name": "quantity", "num_clients": 12},
    policy={"size": 6},
    local={"steps": 1, "batch_size": "all", "lr": 0.1},
    evaluation={"every": 0},
    engine="inline",
)
NOISE = {"clip": 5.0, "sigma": 0.5, "delta": 1e-5, "test_noise": True}
ASYNC = {"devices": {"name": "fleet", "spread": 2.0}}
IN_TURN = {"sampler": "round_robin"}
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "coarse downlink": {"downlink": ["delta", {"name": "top_k", "fraction": 0.05}]},
    "quantised downlink": {"downlink": [{"name": "qsgd", "levels": 4}]},
    "central": {"privacy": {"name": "central", **NOISE}, "sampler": "poisson"},
    "adaptive clip": {
        "privacy": {"name": "central", **NOISE, "clip": 1e-3, "quantile": 0.5, "bit_sigma": 1.0},
        "sampler": "poisson",
    },
    "central by layers": {"privacy": {"name": "central", **NOISE, "per_layer": True}, "sampler": "poisson"},
    "ftrl": {"privacy": {"name": "ftrl", **NOISE}, **IN_TURN},
    "distributed in the open": {"privacy": {"name": "distributed", **NOISE}, **IN_TURN},
    "buffered": {"policy": {"name": "buffered", "size": 3, "concurrency": 8}, **ASYNC},
    "asynchronous": {"policy": {"name": "asynchronous", "concurrency": 6}, **ASYNC},
    "lost devices": {"devices": {"name": "fleet", "dropout": 0.4}, "policy": {"size": 6, "min_reports": 2}},
    "weighted sampler": {"sampler": "weighted"},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
    "scaffold": {"algorithm": "scaffold"},
    "feddyn": {"algorithm": {"name": "feddyn"}},
    "fedadam": {"algorithm": "fedadam"},
    "ditto": {"algorithm": "ditto", "evaluation": {"every": 0, "holdout": 0.2}},
    "fine tuning": {"algorithm": {"name": "fine_tuning", "steps": 2}, "evaluation": {"every": 0, "holdout": 0.2}},
    "krum": {"aggregator": {"name": "multi_krum", "f": 1}},
    "evaluation at clients": {"evaluation": {"every": 1, "clients_every": 1, "holdout": 0.2}},
    "new clients": {"evaluation": {"every": 1, "new_clients": 2, "holdout": 0.2, "adapt_steps": [0, 1]}},
    "batch norm": {"model": "helpers:batch_normed"},
    "a table": {"data": {"name": "synthetic", "num_devices": 12}, "partition": {"name": "natural"}},
}
CORRECTED = ("scaffold", "feddyn")
"""From the second round on their steps are not those of the gradient alone."""
SUMS: dict[str, tuple[dict[str, Any], int]] = {
    "one sum": ({"secagg": {}}, 1),
    "groups": ({"secagg": {"groups": 2}}, 2),
    "lost clients": ({"secagg": {"lost": 0.2, "min_survivors": 3}}, 1),
    "linear codec": ({"secagg": {}, "uplink": [{"name": "clip", "norm": 100.0}]}, 1),
    "statistics": ({"secagg": {}, "model": "helpers:batch_normed"}, 1),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fedper": ({"algorithm": "fedper"}, "keep"),
    "fedbn": ({"algorithm": "fedbn", "model": "helpers:batch_normed"}, "keep"),
    "kept bias": ({"keep": ["*bias"]}, "keep"),
    "fedmd": ({"algorithm": "fedmd", "public": {"name": "held_out", "fraction": 0.1}}, "models of their own"),
    "clusters": (
        {"algorithm": {"name": "ifca", "clusters": 2}, "evaluation": {"holdout": 0.2, "validation": 0.2}},
        "models of their own",
    ),
    "own work": ({"work": "own_works:centroids"}, "work of their own"),
    "colluders who are late": (
        {
            "policy": {"name": "buffered", "size": 3, "concurrency": 8},
            "attack": "alie",
            "attackers": {"num": 2},
            **ASYNC,
        },
        "collude",
    ),
}


def honest(watched: Watched, sight: Sight, truth: Truth) -> Tensor:
    """Return the mean update of the clients of a row by their samples, from the model that was seen."""
    known, total, num = watched.known, torch.zeros(watched.job.spec.num_trainable), 0
    for client in truth.clients:
        x, y = samples_of(watched, Truth((client,), truth.attempt))
        leaf_M = sight.model_M.clone().requires_grad_()
        [grad_M] = torch.autograd.grad(known.loss(known.outputs(leaf_M, x), y).mean(), leaf_M)
        total -= known.lr(sight.version) * len(y) * grad_M[: len(total)]
        num += len(y)
    return total / num


def pairs(watched: Watched) -> list[tuple[Tensor, Tensor]]:
    """Return each row that was seen, and the honest one."""
    found = []
    assert watched.sights
    for sight, truths in zip(watched.sights, watched.truths, strict=True):
        clients = [truth.clients for truth in truths]
        assert sight.num_clients_R == tuple(len(each) for each in clients)
        assert sight.sender_R == tuple(each[0] if len(each) == 1 else None for each in clients)
        assert sight.num_samples_R == tuple(len(samples_of(watched, truth).y) for truth in truths)
        rows = zip(sight.rows.delta_D, truths, strict=True)
        found += [(row, honest(watched, sight, truth)) for row, truth in rows]
    return found


@pytest.mark.parametrize("case", EXACT)
def test_rows_of_clients_are_their_updates(case: str) -> None:
    watched = watch(PLAN.replace(EXACT[case]), 1 if case in CORRECTED else 3)
    assert all(num == 1 for sight in watched.sights for num in sight.num_clients_R)
    for row, true in pairs(watched):
        torch.testing.assert_close(row, true, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("case", SUMS)
def test_sums_are_means_of_clients(case: str) -> None:
    changes, num_rows = SUMS[case]
    watched = watch(PLAN.replace(changes), 2)
    assert all(len(sight.num_clients_R) == num_rows for sight in watched.sights)
    for row, true in pairs(watched):
        assert float((row - true).norm() / true.norm()) < 1e-2


def test_a_buffer_of_several_versions_is_several_sights() -> None:
    watched = watch(PLAN.replace(EXACT["buffered"]), 6)
    late = [sight for sight in watched.sights if not torch.equal(sight.model_M, watched.sights[0].model_M)]
    assert len(watched.sights) > 6 and late
    assert sum(len(sight.num_clients_R) for sight in watched.sights) == 6 * 3


@pytest.mark.parametrize("hidden", [False, True])
def test_the_noise_of_clients_is_in_what_is_seen(hidden: bool) -> None:
    """Local noise is in each row; that of distributed privacy is in the sum alone, and in units of parameters."""
    name, extra = ("distributed", {"secagg": {}}) if hidden else ("local", {})
    watched = watch(PLAN.replace({"privacy": {"name": name, **NOISE}, **IN_TURN, **extra}), 2)
    for row, true in pairs(watched):
        [num] = watched.sights[0].num_clients_R if hidden else [1]
        mean = true
        if hidden:  # all clients count the same under privacy
            truth, sight = watched.truths[0][0], watched.sights[0]
            mean = sum(honest(watched, sight, Truth((client,), 0)) for client in truth.clients) / num
        noise = row - mean if hidden else row - true
        assert float(noise.std()) == pytest.approx(0.5 * 5.0 / num, rel=0.1)
        if hidden:
            break
    if hidden:
        sight = watched.sights[0]
        assert sight.num_clients_R == (6,)
        torch.testing.assert_close(sight.rows.delta_D[0], sight.after_M - sight.model_M, atol=1e-6, rtol=1e-5)


def test_codecs_lose_what_they_lose_before_the_server_sees_it() -> None:
    watched = watch(PLAN.replace({"uplink": [{"name": "top_k", "fraction": 0.1, "error_feedback": False}]}), 1)
    for row, true in pairs(watched):
        assert 0 < int((row != 0).sum()) <= 0.1 * len(row) + 1
        torch.testing.assert_close(row[row != 0], true[row != 0], atol=1e-6, rtol=1e-3)


def test_colluders_are_seen_as_they_lie() -> None:
    watched = watch(PLAN.replace({"attack": "alie", "attackers": {"num": 2}, "policy": {"size": 12}}), 1)
    apart = [float((row - true).norm()) > 1e-4 for row, true in pairs(watched)]
    assert sum(apart) == 2


def test_stragglers_say_how_many_steps_they_took() -> None:
    changes = {"devices": {"name": "stragglers", "fraction": 0.9}, "local": {"steps": 10, "batch_size": 4, "lr": 0.1}}
    watched = watch(PLAN.replace(changes), 1)
    [sight] = watched.sights
    assert len(set(sight.num_steps_R)) > 1 and watched.known.steps(sight) == sight.num_steps_R
    assert max(sight.num_steps_R) <= 10


def test_a_longer_plan_is_watched_as_it_is() -> None:
    """Noise that is set by all rounds of a plan does not shrink where few are watched."""
    private = {"name": "proportional", "noise": 1.0, "epsilon": 8.0, "delta": 1e-5, "test_noise": True}
    plans = [PLAN.replace({"rounds": rounds, "privacy": private}) for rounds in (2, 50)]
    short, long = (watch(plan, 2) for plan in plans)
    assert len(short.sights) == len(long.sights) == 2
    assert short.job.private is not None and long.job.private is not None
    assert long.job.private.sigma > 2 * short.job.private.sigma


@pytest.mark.parametrize("case", REFUSED)
def test_plans_without_a_model_that_all_share_are_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(PlanError, match=f"red team.*{reason}"):
        watch(PLAN.replace(changes), 1)


def test_random_plans_are_watched_or_refused() -> None:
    """Whatever goes together in a plan: rows are finite numbers of the model's type, or there is a reason why not."""
    watched = []
    for seed in range(60):
        try:
            watched.append(watch(Plan(**random_plan(seed)), 2))
        except PlanError:
            continue
    assert len(watched) >= 10
    for each in watched:
        for sight in each.sights:
            assert sight.rows.delta_D.dtype == each.job.spec.dtype and bool(sight.rows.delta_D.isfinite().all())
            assert sight.rows.delta_D.shape == (len(sight.num_samples_R), each.job.spec.num_trainable)
