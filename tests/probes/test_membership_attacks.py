"""Attacks on membership, against who really was trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from probes.membership_plans import few, guess_of, overfitted

from atoll.core.messages import STATISTICS
from atoll.core.parts import find
from atoll.core.probe import Samples, Work
from atoll.data.catalog.cifar10 import cifar10
from atoll.data.catalog.digits import digits
from atoll.data.catalog.fashion_mnist import fashion_mnist
from atoll.data.catalog.mnist import mnist
from atoll.probes.shadows import client_sizes, halves, losses, scaled_confidence, train_stacked
from atoll.redteam.membership_judge import fair_candidates, membership_verdict
from atoll.simulation.seat import samples_of, watch

ATTACKS = ("loss_threshold", "calibrated_loss", "lira", "over_rounds")


@pytest.mark.parametrize("model", ["mlp_2nn", "helpers:batch_normed", "helpers:recurrent", "helpers:grouped"])
def test_shadows_move_exactly_as_clients_that_take_one_step(model: str) -> None:
    """Mapped, with statistics, and one by one where a layer has no mapped form."""
    watched = watch(overfitted(100, model=model, local={"steps": 1, "batch_size": "all", "lr": 0.3}), 1)
    known, [sight], [truths] = watched.known, watched.sights, watched.truths
    for place, truth in enumerate(truths[:2]):
        own, index_SN = samples_of(watched, truth), torch.arange(5).expand(2, -1)
        start_SM = sight.model_M.expand(2, -1)
        moved_SM = train_stacked(known, start_SM, own, index_SN, 0, np.random.default_rng(0)) - start_SM
        true_M = torch.cat([sight.rows.delta_D[place], sight.rows.aux.get(STATISTICS, torch.empty(10, 0))[place]])
        assert true_M.norm() > 1e-3 and torch.allclose(moved_SM, true_M.expand(2, -1), atol=1e-6)


def test_losses_are_those_of_evaluation() -> None:
    """Dropout is off, and batch norm goes by its statistics, so that a sample's loss does not depend on others."""
    for model in ("helpers:dropped", "helpers:batch_normed"):
        watched = watch(overfitted(100, model=model), 1)
        known, model_M = watched.known, watched.final_M
        every, first = (losses(known, model_M, Samples(*(each[:num] for each in known.elsewhere))) for num in (9, 3))
        assert torch.allclose(every[:3], first, atol=1e-6)
        assert known.model.training


def test_confidences_of_nearly_certain_models_stay_apart() -> None:
    phi = scaled_confidence(torch.tensor([1e-9, 1e-6, 0.5, 50.0, 5000.0], dtype=torch.float64))
    assert phi.isfinite().all() and (phi.diff() < 0).all()


def test_each_sample_is_in_one_shadow_of_each_pair() -> None:
    inside = halves(6, 11, np.random.default_rng(0))
    assert (inside[::2] ^ inside[1::2]).all() and inside.sum(1).tolist() in ([6, 5] * 3, [5, 6] * 3)


def test_sizes_of_clients_behind_a_sum_are_taken_for_the_mean() -> None:
    watched = watch(overfitted(100, secagg={}), 1)
    assert watched.sights[0].num_clients_R == (10,) and watched.sights[0].sender_R == (None,)
    assert client_sizes(watched.known, watched.sights[0]) == [5] * 10


def test_labels_that_can_only_be_remembered_tell_members_from_others() -> None:
    data = few(digits(), 100)
    data = replace(data, train_y=np.random.default_rng(0).integers(0, 10, 100))
    alone = {"partition": {"name": "iid", "num_clients": 1}, "local": {"steps": 400, "batch_size": "all", "lr": 0.5}}
    watched = watch(overfitted(100, data=data, **alone), 1)
    candidates, member_C = fair_candidates(watched, 100, np.random.default_rng(0))
    assert membership_verdict(guess_of("loss_threshold", watched, candidates).score_C, member_C).auc > 0.9


@pytest.mark.parametrize("name", ATTACKS)
def test_where_time_is_over_the_score_of_the_model_alone_is_given(name: str) -> None:
    watched = watch(overfitted(100), 1)
    candidates, _ = fair_candidates(watched, 100, np.random.default_rng(0))
    work = Work(np.random.default_rng(5), lambda: True, candidates)
    [guess] = find("probes", name)().run(watched.known, watched.sights, work)
    plain = guess_of("loss_threshold", watched, candidates)
    assert guess.score_C is not None and plain.score_C is not None
    assert torch.equal(guess.score_C.argsort(), plain.score_C.argsort())


def test_why_not_says_what_is_missing() -> None:
    known = watch(overfitted(100), 1).known
    for name in ATTACKS:
        assert "no round came to an end" in (find("probes", name)().why_not(known, []) or "")
    alone = known._replace(elsewhere=known.elsewhere._replace(x=known.elsewhere.x[:3]))
    assert "has 3" in (find("probes", "calibrated_loss")().why_not(alone, []) or "")


@pytest.mark.slow
def test_shadow_models_see_more_than_a_threshold_on_the_loss() -> None:
    watched = watch(overfitted(800, mnist(quiet=True)), 15)
    candidates, member_C = fair_candidates(watched, 800, np.random.default_rng(0))
    found = {name: membership_verdict(guess_of(name, watched, candidates).score_C, member_C).auc for name in ATTACKS}
    assert found["lira"] > found["loss_threshold"] + 0.1, found
    assert found["calibrated_loss"] > found["loss_threshold"] + 0.03, found
    assert found["over_rounds"] > found["lira"], found


@pytest.mark.slow
def test_shadow_models_see_more_on_other_data_too() -> None:
    """Where models have begun to remember: after 15 rounds a small model on CIFAR-10 has not, and LiRA gains 0.02."""
    small = {"name": "mlp_2nn", "hidden": 32}
    plans = [(overfitted(800, fashion_mnist(quiet=True)), 15), (overfitted(400, cifar10(quiet=True), model=small), 40)]
    for plan, rounds in plans:
        watched = watch(plan, rounds)
        candidates, member_C = fair_candidates(watched, 2 * watched.known.num_train, np.random.default_rng(0))
        guesses = [guess_of(name, watched, candidates) for name in ("loss_threshold", "lira")]
        plain, shadows = (membership_verdict(guess.score_C, member_C).auc for guess in guesses)
        assert shadows > plain + 0.05, (plan.data, plain, shadows)


@pytest.mark.slow
def test_shadows_of_models_that_hardly_remember_do_no_harm() -> None:
    """Shifts that few shadows cannot tell apart are taken to be alike, so that the score stays above the loss's."""
    watched = watch(overfitted(400), 20)
    candidates, member_C = fair_candidates(watched, 400, np.random.default_rng(0))
    guesses = [guess_of(name, watched, candidates) for name in ("loss_threshold", "lira")]
    plain, shadows = (membership_verdict(guess.score_C, member_C).auc for guess in guesses)
    assert shadows > plain


@pytest.mark.slow
def test_no_attack_on_membership_gets_past_epsilon_one() -> None:
    private = {"name": "sample", "clip": 1.0, "sigma": 4.0, "delta": 1e-4, "epsilon": 1.0, "test_noise": True}
    watched = watch(overfitted(2000, mnist(quiet=True), privacy=private), 5)
    assert len(watched.sights) == 5
    candidates, member_C = fair_candidates(watched, 2000, np.random.default_rng(0))
    for name in ATTACKS:
        verdict = membership_verdict(guess_of(name, watched, candidates).score_C, member_C, delta=1e-4)
        assert verdict.auc < 0.55 and verdict.epsilon <= 1.0, (name, verdict)
