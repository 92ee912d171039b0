"""The judge of attacks on membership: areas, rates and bounds with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from probes.membership_plans import overfitted

from atoll.core.errors import DataError
from atoll.redteam.membership_judge import auc, epsilon_lower_bound, fair_candidates, membership_verdict, tpr_at_fpr
from atoll.simulation.seat import samples_of, watch


def test_area_of_normal_scores_is_the_known_one() -> None:
    rng = np.random.default_rng(0)
    member = torch.arange(20000) % 2 == 0
    score = torch.from_numpy(rng.normal(size=20000)) + member.double()
    assert auc(score, member) == pytest.approx(0.7602, abs=0.01)  # Phi(1 / sqrt 2)
    assert tpr_at_fpr(score, member, 0.01) == pytest.approx(0.0924, abs=0.015)  # Phi(1 - 2.326)


def test_ties_count_half_and_are_no_true_positives() -> None:
    member = torch.tensor([True, False, True, False])
    assert auc(torch.zeros(4), member) == 0.5
    assert tpr_at_fpr(torch.zeros(4), member, 0.01) == 0.0


def test_randomised_response_has_the_epsilon_that_is_found() -> None:
    """Scores that are right with probability e / (1 + e) are private with epsilon 1, and no bound may exceed it."""
    bounds = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        member = torch.from_numpy(rng.random(20000) < 0.5)
        right = torch.from_numpy(rng.random(20000) < math.e / (1 + math.e))
        bounds.append(epsilon_lower_bound((member == right).double(), member, seed=seed))
    assert np.mean([bound <= 1 for bound in bounds]) >= 0.9 and np.mean(bounds) > 0.85


def test_scores_that_find_others_alone_have_a_bound_too() -> None:
    member = torch.arange(2000) % 2 == 0
    score = torch.where(member | (torch.arange(2000) % 20 < 10), 1.0, 0.0)  # half of the others, and no member, score 0
    assert epsilon_lower_bound(score, member) > 3
    assert epsilon_lower_bound(score.neg(), member.logical_not()) > 3


def test_scores_of_nothing_show_nothing() -> None:
    rng = np.random.default_rng(3)
    verdict = membership_verdict(torch.from_numpy(rng.normal(size=1000)), torch.arange(1000) % 2 == 0)
    assert abs(verdict.auc - 0.5) < 0.06 and verdict.epsilon == 0 and verdict.tpr_at_0_01 < 0.05


def test_scores_without_members_are_refused() -> None:
    with pytest.raises(DataError, match="with 0 members"):
        auc(torch.zeros(3), torch.zeros(3, dtype=torch.bool))


def test_candidates_are_half_members_and_others_come_from_the_same_samples() -> None:
    watched = watch(overfitted(100), 1)
    candidates, member_C = fair_candidates(watched, 60, np.random.default_rng(0))
    trained = torch.cat([samples_of(watched, truth).x for truth in watched.truths[0]]).flatten(1)
    inside = [bool((trained == x.flatten()).all(1).any()) for x in candidates.x]
    assert inside == member_C.tolist() and sum(inside) == 30
    every = torch.from_numpy(np.asarray(watched.job.federation.dataset.train_x)).flatten(1)
    assert all(bool((every == (x.flatten() * 16).round()).all(1).any()) for x in candidates.x)


def test_test_samples_stand_in_where_all_training_samples_are_used() -> None:
    watched = watch(overfitted(100, evaluation={}), 1, elsewhere=300)
    candidates, member_C = fair_candidates(watched, 100, np.random.default_rng(0))
    seen = watched.known.elsewhere.x.flatten(1)
    assert not any(bool((seen == x.flatten()).all(1).any()) for x in candidates.x[~member_C])
    with pytest.raises(DataError, match="60 others"):
        fair_candidates(watched, 2000, np.random.default_rng(0))
