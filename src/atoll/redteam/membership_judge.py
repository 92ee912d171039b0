"""Judge attacks on membership. Shapes: C candidates, I members, O others."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.probe import Samples
from atoll.privacy.auditing import rate_upper_bound
from atoll.simulation.seat import Watched


class Verdict(NamedTuple):
    """How well scores tell members from others."""

    auc: float
    """Chance that a member scores above another sample; 0.5 is guessing."""
    tpr_at_0_001: float
    """Share of members found where 0.1 % of the others are taken for members."""
    tpr_at_0_01: float
    epsilon: float
    """Lower bound on epsilon at the confidence and delta asked for; 0 if the scores show nothing."""


def membership_verdict(
    score_C: Tensor, member_C: Tensor, *, delta: float = 0.0, confidence: float = 0.95, seed: int = 0
) -> Verdict:
    """Judge scores of candidates by who was a member."""
    return Verdict(
        auc=auc(score_C, member_C),
        tpr_at_0_001=tpr_at_fpr(score_C, member_C, 0.001),
        tpr_at_0_01=tpr_at_fpr(score_C, member_C, 0.01),
        epsilon=epsilon_lower_bound(score_C, member_C, delta=delta, confidence=confidence, seed=seed),
    )


def auc(score_C: Tensor, member_C: Tensor) -> float:
    """Return the area under the ROC curve: the chance that a member scores above another sample, ties by half.

    >>> auc(torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, False, False]))
    0.75
    """
    inside_I, outside_O = _apart(score_C, member_C)
    ordered_O = np.sort(outside_O)
    below = np.searchsorted(ordered_O, inside_I, "left") + np.searchsorted(ordered_O, inside_I, "right")
    return float(below.mean() / 2 / len(outside_O))


def tpr_at_fpr(score_C: Tensor, member_C: Tensor, fpr: float) -> float:
    """Return the share of members above the threshold that at most a share `fpr` of the others exceeds.

    >>> tpr_at_fpr(torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, False, False]), 0.1)
    0.5
    """
    inside_I, outside_O = _apart(score_C, member_C)
    allowed = math.floor(fpr * len(outside_O) + 1e-9)
    return float((inside_I > np.sort(outside_O)[::-1][allowed]).mean())


def epsilon_lower_bound(
    score_C: Tensor, member_C: Tensor, *, delta: float = 0.0, confidence: float = 0.95, seed: int = 0
) -> float:
    """Return a lower bound on epsilon (Jagielski et al. 2020, arXiv:2006.07709, section 2.3).

    An (epsilon, delta)-private training bounds every test: TPR <= exp(epsilon) FPR + delta, and the same of those who
    are called non-members. A threshold is chosen on one half of the candidates; Clopper-Pearson bounds on its rates in
    the other half give ln((TPR - delta) / FPR). Candidates are taken for independent, though one run trained on all.
    """
    inside_I, outside_O = _apart(score_C, member_C)
    rng = np.random.default_rng(seed)
    inside_I, outside_O = rng.permutation(inside_I), rng.permutation(outside_O)
    if min(len(inside_I), len(outside_O)) < 2:
        return 0.0
    calls = ((inside_I, outside_O), (-outside_O, -inside_I))  # samples called members, and called others
    thresholds = np.unique(np.concatenate([inside_I[::2], outside_O[::2]]))
    thresholds = thresholds[:: max(1, len(thresholds) // 200)]
    _, call, threshold = max(
        (_bound(right[::2], wrong[::2], sign * each, delta, confidence), call, sign * each)
        for each in thresholds
        for call, (sign, (right, wrong)) in enumerate(zip((1, -1), calls, strict=True))
    )
    right, wrong = calls[call]
    return _bound(right[1::2], wrong[1::2], threshold, delta, confidence)


def _bound(right_I: np.ndarray, wrong_O: np.ndarray, threshold: float, delta: float, confidence: float) -> float:
    """Return ln((hit rate - delta) / false rate) of one threshold, with both rates at the bad end of their bounds."""
    one_sided = (1 + confidence) / 2
    num_missed, num_false = int((right_I < threshold).sum()), int((wrong_O >= threshold).sum())
    hits = 1 - rate_upper_bound(num_missed, len(right_I), one_sided)
    false = rate_upper_bound(num_false, len(wrong_O), one_sided)
    return max(0.0, math.log((hits - delta) / false)) if hits > delta else 0.0


def _apart(score_C: Tensor, member_C: Tensor) -> tuple[np.ndarray, np.ndarray]:
    member, score = member_C.numpy().astype(bool), score_C.double().numpy()
    if score.shape != member.shape or not 0 < member.sum() < len(member):
        raise DataError(
            f"a judge needs a score for every candidate, and members and others among them: got scores {score.shape} "
            f"for {len(member)} candidates with {int(member.sum())} members"
        )
    return score[member], score[~member]


def most_candidates(watched: Watched) -> int:
    """Return how many candidates `fair_candidates` can find: twice the fewer of members and others."""
    federation = watched.job.federation
    used = np.unique(np.concatenate([federation.train_indices(client) for client in range(federation.num_clients)]))
    spare = federation.dataset.num_test - len(watched.known.elsewhere.x)
    return 2 * min(len(used), max(federation.dataset.num_train - len(used), spare))


def fair_candidates(watched: Watched, num: int, rng: np.random.Generator) -> tuple[Samples, Tensor]:
    """Return candidates, half of them trained on, and which are: for the judge; probes see the samples alone.

    Others are training samples that no client trains on (held out or not dealt), or, if those are too few, test samples
    that the attacker does not have: only the first are surely of the same distribution.
    """
    job, federation = watched.job, watched.job.federation
    used = np.unique(np.concatenate([federation.train_indices(client) for client in range(federation.num_clients)]))
    unused = np.setdiff1d(np.arange(federation.dataset.num_train), used)
    half, first = num // 2, len(watched.known.elsewhere.x)
    spare = len(unused) if len(unused) >= half else federation.dataset.num_test - first
    if half < 1 or min(len(used), spare) < half:
        raise DataError(
            f"{num} candidates need {half} members and as many others: there are {len(used)} members and "
            f"{spare} others; ask for fewer candidates, leave the attacker fewer test samples, or set a holdout"
        )

    def training(indices: np.ndarray) -> Samples:
        picked = torch.from_numpy(np.sort(rng.choice(indices, half, replace=False)))
        return Samples(job.inputs(federation.features(federation.take(picked))), federation.train_y[picked])

    inside = training(used)
    if len(unused) >= half:
        outside = training(unused)
    else:
        x, y = federation.test_samples(first, federation.dataset.num_test).load()
        picked = torch.from_numpy(rng.choice(len(y), half, replace=False))
        outside = Samples(job.inputs(x)[picked], y[picked])
    order = torch.from_numpy(rng.permutation(2 * half))
    x, y = torch.cat([inside.x, outside.x])[order], torch.cat([inside.y, outside.y])[order]
    return Samples(x.contiguous(), y), order < half
