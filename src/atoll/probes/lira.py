"""Membership by likelihood ratio. Shapes: S shadows, T versions, P samples of the pool, C candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.options import Range
from atoll.core.probe import MEMBERSHIP, Guess, Known, Probe, Sight, Work
from atoll.probes.calibrated_loss import elsewhere_only, joined
from atoll.probes.loss_threshold import no_round
from atoll.probes.shadows import Shadows, halves, losses, scaled_confidence, train_shadows

NumShadows = Annotated[int, Range(4, 4096, hint="half of them train on each candidate, and both halves have a spread")]
PRIOR = 16.0
"""How many shadows the mean variance of all candidates counts for, beside a candidate's own."""


def lira(num_shadows: NumShadows = 32) -> Probe:
    """Compare Gaussians of models with and without a sample (Carlini et al. 2022, arXiv:2112.03570, algorithm 1).

    score = log N(phi; mu_in, s^2) - log N(phi; mu_out, s^2), phi = log(p / (1 - p)) of the last version. Every shadow
    is a federation that the attacker runs from the first model that was sent, on one half of the candidates, filled up
    with samples from elsewhere to the number that clients have. Few shadows tell variances poorly (section VI-C), and
    shifts too: s^2 is the mean of both variances, drawn towards the mean over all candidates, and so is
    (mu_in - mu_out) / s, by as much of its spread as so few shadows give by chance (James and Stein 1961).
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None:
            return []
        phi_C = scaled_confidence(losses(known, sights[-1].after_M, work.candidates))
        shadows = candidate_shadows(known, sights, work, num_shadows)
        if shadows is None:
            return [Guess(score_C=phi_C)]
        num, phi_SC = len(phi_C), shadows.phi_STP[:, -1, : len(phi_C)]
        inside_SC = shadows.inside_SP[:, :num]
        score_C = _log_ratio(phi_C, phi_SC, inside_SC)
        return [Guess(score_C=score_C, notes={"shadows": float(len(phi_SC))})]

    return Probe(goal=MEMBERSHIP, run=run, why_not=no_round)


def candidate_shadows(
    known: Known, sights: Sequence[Sight], work: Work, num_shadows: int, *, versions: bool = False
) -> Shadows | None:
    """Train shadows on halves of the candidates and on samples from elsewhere; None if there is no time."""
    assert work.candidates is not None
    num = len(work.candidates.x)
    in_SC = halves(num_shadows, num, work.rng)
    filled = max(0, known.num_train - num // 2)
    extra_SP = elsewhere_only(len(in_SC), num, known._replace(num_train=filled), work.rng)
    extra_SP[:, :num] = in_SC
    return train_shadows(known, sights, joined(work.candidates, known.elsewhere), extra_SP, work, versions=versions)


def moments(phi_STC: Tensor, chosen_SC: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each candidate's confidence over the chosen shadows, in each version."""
    chosen_STC, num_C = chosen_SC.unsqueeze(1), chosen_SC.sum(0).clamp(min=1)
    mean_TC = torch.where(chosen_STC, phi_STC, 0.0).sum(0) / num_C
    squares_TC = torch.where(chosen_STC, (phi_STC - mean_TC).square(), 0.0).sum(0)
    common_T1 = squares_TC.sum(1, keepdim=True) / (num_C - 1).sum().clamp(min=1)
    return mean_TC, ((squares_TC + PRIOR * common_T1) / (num_C - 1 + PRIOR)).clamp(min=1e-12)


def _log_ratio(phi_C: Tensor, phi_SC: Tensor, inside_SC: Tensor) -> Tensor:
    """Return the log likelihood ratio of each candidate's confidence with and without it."""
    (in_C, var_in_C), (out_C, var_out_C) = (
        (mean_1C[0], var_1C[0])
        for mean_1C, var_1C in (moments(phi_SC.unsqueeze(1), x) for x in (inside_SC, ~inside_SC))
    )
    spread_C = ((var_in_C + var_out_C) / 2).sqrt()
    shift_C = (in_C - out_C) / spread_C
    by_chance = (1 / inside_SC.sum(0).clamp(min=1) + 1 / (~inside_SC).sum(0).clamp(min=1)).mean()
    own = (1 - by_chance / shift_C.var().clamp(min=1e-12)).clamp(min=0)
    shift_C = shift_C.mean() + own * (shift_C - shift_C.mean())
    return shift_C * (phi_C - (in_C + out_C) / 2) / spread_C
