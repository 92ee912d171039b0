"""Defences inside the machines: what they change of training, what they draw, and what is claimed of them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from split.models import plan_of
from torch import Tensor

from atoll import Plan, run
from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.core.privacy import CutNoise, Exposure
from atoll.privacy.accounting import spent
from atoll.privacy.mechanisms.activations import activations
from atoll.simulation.cut_seat import CutWatched, watch_cut
from atoll.split.correlation import correlation
from atoll.split.defences.marvell import best_spread
from atoll.split.half import Half
from atoll.split.machines import ServerMachine, ServerState
from atoll.split.messages import TARGETS, VALUES, Kind, Message
from atoll.split.parties import build_parties
from atoll.split.session import session_of
from atoll.split.shield import Place, Shield, clipped_noise
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.loop import load_batch

HERE = Place(0, 0, 0, 0)
CLAIM = {"name": "activations", "clip": 0.5, "sigma": 4.0, "delta": 1e-5}
SAFE: dict[str, Any] = {"cut": "2", "tail": "5", "frozen": True}


def short(split: dict[str, Any], **fields: Any) -> Plan:
    local = {"steps": 2, "batch_size": 10, "lr": 0.05}
    return plan_of(split, **{"local": local, "num_clients": 3, "model": {"name": "mlp_2nn", "hidden": 8}, **fields})


def test_nopeek_takes_the_step_of_both_losses() -> None:
    """The client's layers move by the gradient of loss + weight * dCor of the whole model, in two pieces of a batch."""
    weight, local = 0.7, {"steps": 1, "batch_size": 10, "lr": 0.5}
    split = {"cut": "2", "micro_batches": 2, "defences": [{"name": "nopeek", "weight": weight}]}
    plan = plan_of(split, local=local, model={"name": "mlp_2nn", "hidden": 8})
    job = build_job(plan)
    task = Task(0, 0, 0)
    [indices] = client_batches(job, task)
    batch = load_batch(job, torch.from_numpy(indices), task, job.first_D[:0], 0)
    model = job.model
    head, rest = model[:3], model[3:]
    activations_B = head(batch.x)
    peek = sum(correlation(batch.x[rows], activations_B[rows]) * 0.5 for rows in (slice(0, 5), slice(5, 10)))
    loss = (job.loss(rest(activations_B), batch.y) * batch.weight).sum() + weight * peek
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([(p - 0.5 * g).detach().flatten() for p, g in zip(model.parameters(), grads, strict=True)])
    torch.testing.assert_close(run(plan).params_D, expected, atol=1e-6, rtol=1e-6)
    without = run(plan.replace({"split.defences": []})).params_D
    assert float((without - expected).abs().max()) > 1e-3


def test_activations_are_clipped_and_noise_has_its_size() -> None:
    values = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 400).unsqueeze(1)
    shield = Shield((clipped_noise(CutNoise(2.0, 0.5)),), bytes(32))
    shaped = shield.shaped(values)
    assert float(shaped.norm(dim=1).max()) <= 2.0 * (1 + 1e-6)
    short_ones = values.norm(dim=1) <= 2.0
    assert 0 < int(short_ones.sum()) < 400 and torch.equal(shaped[short_ones], values[short_ones])
    noise = (shield.sent(shaped, HERE) - shaped).double()
    assert float(noise.std()) == pytest.approx(1.0, rel=0.03) and abs(float(noise.mean())) < 0.03
    steps = shield.sent(shaped, HERE).double() * (2**24 / 2.0)
    assert float((steps - steps.round()).abs().max()) < 1e-9 * 2**30, "values must lie on the grid"


def test_the_client_trains_with_what_it_sent_clipped() -> None:
    """The gradient goes back through the clip: that of a loss of the clipped activations."""
    values = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    shield = Shield((clipped_noise(CutNoise(1.0, 0.5)),), bytes(32))
    assert torch.autograd.gradcheck(shield.shaped, (values,))


@pytest.mark.parametrize("defences", [["max_norm"], [{"name": "noise", "clip": 1.0, "sigma": 0.5}]])
def test_secret_noise_is_another_in_every_run_and_the_same_after_a_stop(defences: list[Any], tmp_path: Path) -> None:
    plan = short({"cut": "2", "tail": "5", "defences": defences}, rounds=2)
    run(plan.replace({"rounds": 1}), out=tmp_path / "a", report=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ends = [run(plan, out=tmp_path / name, resume=True, report=False).params_D for name in "ab"]
    assert torch.equal(*ends) and not torch.equal(ends[0], run(plan).params_D)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "c" / "privacy.ledger").unlink()
    with pytest.raises(RunError, match=r"privacy\.ledger is gone"):
        run(plan.replace({"rounds": 3}), out=tmp_path / "c", resume=True, report=False)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Solve delta = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) (Balle and Wang 2018, arXiv:1805.06530, theorem 8)."""

    def excess(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta)

    return float(brentq(excess, 0.0, 200.0))


@pytest.mark.parametrize(
    ("local", "passes"), [({"epochs": 3, "batch_size": 7}, 3), ({"steps": 7, "batch_size": 20}, 3)]
)
def test_epsilon_is_that_of_as_many_gaussians_as_a_sample_is_sent(local: dict[str, Any], passes: int) -> None:
    """Clients have 50 samples each: 7 batches of 20 begin a third pass."""
    plan = short(SAFE, rounds=2, privacy={**CLAIM, "test_noise": True}, local={**local, "lr": 0.01})
    plan = plan.replace({"partition.samples_per_client": 50})
    watched = watch_cut(plan, 1)
    rows = [each.x.flatten(1).unique(dim=0, return_counts=True)[1] for each in watched.truths]
    most = max(int(counts.max()) for counts in rows)
    assert passes <= most <= passes + 1  # two samples of the data may be equal
    epsilon = run(plan).history[-1]["privacy"]["epsilon"]
    assert epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2 * passes) * 2 / 4.0, 1e-5), rel=1e-3)


def test_a_budget_ends_the_run() -> None:
    first = spent(activations(0.5, 4.0, 1e-5), Exposure("uniform", 1.0, 1, 0.02, 50)).epsilon
    result = run(short(SAFE, rounds=5, privacy={**CLAIM, "epsilon": 1.2 * first}, local={"lr": 0.01}))
    assert result.reason == "privacy budget spent" and len(result.history) == 1
    assert result.history[-1]["privacy"]["epsilon"] == pytest.approx(first, rel=1e-3)


def test_frozen_layers_stay_and_the_others_move() -> None:
    for split in ({"cut": "2", "frozen": True}, SAFE):
        plan = short(split, local={"steps": 2, "lr": 0.1, "optimizer": {"name": "sgd", "weight_decay": 0.1}})
        job = build_job(plan)
        before, after = (job.spec.views(each) for each in (job.first_D, run(plan).params_D))
        assert torch.equal(before["1.weight"], after["1.weight"]) and torch.equal(before["1.bias"], after["1.bias"])
        assert not torch.equal(before["3.weight"], after["3.weight"])
        assert not torch.equal(before["5.weight"], after["5.weight"])


def seen(**split: Any) -> CutWatched:
    return watch_cut(short({"cut": "2", "tail": "5", **split}), 1)


def test_a_perturbed_gradient_is_sent_and_only_that() -> None:
    plain, noisy = seen(), seen(defences=[{"name": "max_norm", "test_noise": True}])
    first, other = plain.sights[0], noisy.sights[0]
    ours, theirs = first.gradients_N, other.gradients_N
    assert ours is not None and theirs is not None
    begin = first.batch_N == 0
    assert torch.equal(first.activations_N[begin], other.activations_N[begin])
    assert not torch.equal(ours[begin], theirs[begin])
    cosine = torch.nn.functional.cosine_similarity(ours[begin].flatten(1), theirs[begin].flatten(1)).abs()
    assert float(cosine.min()) > 0.999, "max_norm keeps directions up to their sign"


def test_holders_without_labels_get_perturbed_gradients() -> None:
    """Two holders of columns: the one that has the labels gets exact gradients."""
    plan = plan_of({"cut": "2"}, model={"name": "mlp_2nn", "hidden": 8})
    job = build_job(plan)
    parties = build_parties(plan, job)
    labels = torch.tensor([0, 1, 1, 0], dtype=torch.uint8)

    def gradients(shield: Shield) -> dict[int, Tensor]:
        machine = ServerMachine(
            cut=parties.cut,
            half=Half(job, parties.cut.server),
            session=session_of(job, Task(0, 0, 0), 1, 1),
            holders={4: (3,), 9: (5,)},
            labels=9,
            shield=shield,
        )
        rows = torch.linspace(-1, 1, 32).view(4, 8)
        arrays = ({VALUES: rows[:, :3]}, {VALUES: rows[:, 3:].contiguous(), TARGETS: labels})
        state, answers = ServerState(), list[Message]()
        for holder, array in zip((4, 9), arrays, strict=True):
            state, answers = machine.handle(state, Message(Kind.ACTIVATIONS, holder, 0, 0, 1, 4, array))
        return {message.holder: message.values for message in answers}

    defence = short({"cut": "2", "tail": "5", "defences": ["max_norm"]})
    plain, noisy = gradients(Shield()), gradients(build_parties(defence, build_job(defence)).shield)
    assert torch.equal(plain[9], noisy[9]) and not torch.equal(plain[4], noisy[4])


def test_marvell_spends_its_power_and_finds_less_divergence_than_equal_noise() -> None:
    draws = torch.Generator().manual_seed(3)
    positive = torch.arange(60) % 4 == 0
    flat = 0.1 * torch.randn(60, 12, generator=draws, dtype=torch.float64)
    flat[positive] += 1.0
    means = [flat[~positive].mean(0), flat[positive].mean(0)]
    square, share = float((means[1] - means[0]).square().sum()), 0.25
    for scale in (0.1, 1.0, 10.0):
        spread = best_spread(flat, positive, means, scale)
        power = sum(
            weight * (spread.along[side] + 11 * spread.across[side]) for side, weight in ((1, share), (0, 1 - share))
        )
        assert power == pytest.approx(scale * square, rel=1e-6)

        def divergence(along: tuple[float, float], across: tuple[float, float]) -> float:
            own = [float((flat[positive == bool(s)] - means[s]).square().sum(1).mean()) / 12 for s in (0, 1)]
            (l0, l1), (k0, k1) = ([each[s] + own[s] for s in (0, 1)] for each in (along, across))
            return 11 * (k0 / k1 + k1 / k0) + (l0 + square) / l1 + (l1 + square) / l0

        equal = scale * square / 12
        assert divergence(*spread) < divergence((equal, equal), (equal, equal))


def test_the_red_teams_plan_and_the_plan_check_name_the_rule() -> None:
    with pytest.raises(PlanError, match="no epsilon can be claimed"):
        run(short({"cut": "2"}, privacy=CLAIM))
