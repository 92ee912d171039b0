"""Which classes clients have, from how the last layer moved. Shapes: K classes, R rows, N samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.core.probe import LABELS, Guess, Known, Probe, Sight, Work

MOST = 1000
"""Samples from elsewhere that the model is asked about."""
FIRM = 100.0
"""Weight of the condition that shares add up to 1."""


def label_distribution() -> Probe:
    """Solve for class shares from updates of the last bias (after Wainakh et al. 2022, arXiv:2105.09369, section 3).

    Each step moves the bias of class k by -lr (p_k - s_k), p_k being the mean probability of k on the client's samples
    and s_k the share of the class. With P[c, k] the mean probability of k on samples of class c, p = P^T s, so that
    (I - P^T) s = delta_bias / (lr steps), with s >= 0 and sum(s) = 1: least squares. P comes from samples from
    elsewhere, halfway between the model before and after. What a client sends in several rounds is averaged, and the
    first rounds count most: there the equation holds best.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        shares, senders, nums = list[Tensor](), list[object](), list[int]()
        for sight in sights:
            if work.is_over() and shares:
                break
            shares += _shares(known, sight)
            who = sight.sender_R or (None,) * len(sight.num_clients_R)
            senders += [object() if each is None else each for each in who]
            nums += sight.num_samples_R
        guesses = list[Guess]()
        for row, (sender, num) in enumerate(zip(senders, nums, strict=True)):
            own_TK = torch.stack([each for each, other in zip(shares, senders, strict=True) if other == sender])
            weight_T1 = 1 / torch.arange(1, len(own_TK) + 1).unsqueeze(1)
            counts_K = (own_TK * weight_T1).sum(0) / weight_T1.sum() * (num or 1)
            guesses.append(Guess(row=row, counts_K=counts_K, notes={"rounds": float(len(own_TK))}))
        return guesses

    return Probe(goal=LABELS, run=run, why_not=no_class_bias)


def no_class_bias(known: Known, sights: Sequence[Sight]) -> str | None:
    """Return why classes cannot be read off the last layer."""
    last = known.spec.trainable[-1]
    if known.tokens or known.elsewhere.y.dim() != 1 or known.elsewhere.y.dtype.is_floating_point:
        return "samples do not have one class each, whose share could be found"
    if last.shape != (known.num_classes,):
        return f"the model does not end with a bias for each of {known.num_classes} classes that clients send"
    return None


def _shares(known: Known, sight: Sight) -> list[Tensor]:
    """Return the class shares that explain each row."""
    moved_RK = known.spec.without_buffers.views(sight.rows.delta_D.double())[known.spec.trainable[-1].name]
    rows = zip(sight.rows.delta_D, moved_RK, known.steps(sight), strict=True)
    lr = known.lr(sight.version)
    return [_solved(_slope(known, sight, delta_D), moved_K / (lr * steps)) for delta_D, moved_K, steps in rows]


def _slope(known: Known, sight: Sight, delta_D: Tensor) -> Tensor:
    """Return I - P^T, by how much shares move the bias."""
    after_M = sight.model_M.clone()
    after_M[: len(delta_D)] += delta_D
    between_KK = (_mean_probabilities(known, sight.model_M) + _mean_probabilities(known, after_M)) / 2
    return torch.eye(known.num_classes, dtype=torch.float64) - between_KK.T


def _solved(slope_KK: Tensor, rate_K: Tensor) -> Tensor:
    """Return shares, at least 0 and 1 together, that explain by how much the bias moved."""
    from scipy.optimize import nnls

    ones_1K = torch.full((1, len(rate_K)), FIRM, dtype=torch.float64)
    found_K, _ = nnls(torch.cat([slope_KK, ones_1K]).numpy(), np.append(rate_K.numpy(), FIRM))
    shares_K = torch.from_numpy(found_K)
    return shares_K / shares_K.sum().clamp(min=1e-12)


def _mean_probabilities(known: Known, model_M: Tensor) -> Tensor:
    """Return the mean probability of each class on samples of each class from elsewhere; 1/K where there are none."""
    x, y = known.elsewhere.x[:MOST], known.elsewhere.y[:MOST].long()
    with torch.no_grad():
        p_NK = known.outputs(model_M, x).double().softmax(-1)
    found_KK = torch.full((known.num_classes, known.num_classes), 1 / known.num_classes, dtype=torch.float64)
    for label in set(y.tolist()):
        found_KK[label] = p_NK[y == label].mean(0)
    return found_KK
