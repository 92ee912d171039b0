"""The red team as a whole: what a server sees, what probes get of it, and the command."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.redteam.run import red_team
from atoll.simulation.seat import Watched, samples_of, watch

PLAN = Plan(
    model={"name": "mlp_2nn", "hidden": 64},
    partition={"num_clients": 12, "samples_per_client": 4},
    policy={"size": 4},
    local={"steps": 1, "batch_size": "all", "lr": 0.1},
    engine="inline",
)
SEES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (1, 1, 1, 1)),
    "codec": ({"uplink": [{"name": "top_k", "fraction": 0.1}]}, (1, 1, 1, 1)),
    "local noise": ({"privacy": {"name": "local", "clip": 1.0, "sigma": 0.5, "delta": 1e-5}}, (1, 1, 1, 1)),
    "sum": ({"secagg": {}}, (4,)),
}


@pytest.mark.parametrize("way", SEES)
def test_the_server_sees_what_the_plan_lets_it_see(way: str) -> None:
    changes, num_clients = SEES[way]
    watched = watch(PLAN.replace(changes), 2)
    assert [sight.num_clients_R for sight in watched.sights] == [num_clients] * 2
    sight, truths = watched.sights[0], watched.truths[0]
    assert sight.rows.delta_D.shape == (len(num_clients), watched.job.spec.num_trainable)
    assert not torch.equal(sight.after_M, sight.model_M) and torch.equal(watched.sights[1].model_M, sight.after_M)
    assert [len(truth.clients) for truth in truths] == list(num_clients)
    zeros = float((sight.rows.delta_D == 0).double().mean())
    assert (zeros > 0.85) == (way == "codec")


def test_a_single_step_shows_the_gradient() -> None:
    watched = watch(PLAN, 1)
    known, [sight] = watched.known, watched.sights
    for row, truth in enumerate(watched.truths[0]):
        x, y = samples_of(watched, truth)
        leaf_M = sight.model_M.clone().requires_grad_()
        [grad_M] = torch.autograd.grad(known.loss(known.outputs(leaf_M, x), y).mean(), leaf_M)
        torch.testing.assert_close(known.gradients(sight)[row], grad_M, atol=1e-6, rtol=1e-4)


def test_what_is_broken_is_called_broken() -> None:
    """Plain updates give samples and labels away; local noise takes both, down to what needs no attack."""
    plain, noisy = (
        red_team(PLAN.replace(changes), probes=["linear_leak", "label_counts"], rounds=1)
        for changes in ({}, {"privacy": {"name": "local", "clip": 1.0, "sigma": 2.0, "delta": 1e-5}})
    )
    samples, labels = plain.findings
    assert samples.figures["best PSNR in dB"] > 100 and samples.figures["share of samples above 30 dB"] >= 0.5
    assert labels.figures["share of labels right"] == 1.0
    assert noisy.findings[0].figures.get("best PSNR in dB", 0.0) < 20
    assert "local noise" in noisy.sees and "4 updates of single clients" in plain.sees


def test_recorded_updates_are_attacked_and_nothing_is_simulated() -> None:
    asked = list[int]()

    def recorded(num_public: int) -> Watched:
        asked.append(num_public)
        return watch(PLAN, 1, elsewhere=num_public)

    found = red_team(PLAN, probes=["linear_leak", "trap_weights"], recorded=recorded)
    leak, trap = found.findings
    assert leak.figures["best PSNR in dB"] > 100 and "did not plant" in trap.why_not
    assert asked == [180] and not found.changes and not found.poisoned and "Recorded updates" in found.not_tried[0]


@pytest.mark.parametrize("changes", [{"algorithm": "fedper"}, {"algorithm": "fedrep"}])
def test_what_has_no_shared_model_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="red team"):
        watch(PLAN.replace(changes), 1)
