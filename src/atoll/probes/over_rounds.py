"""Membership by confidences in all versions that the server saw. Shapes: S shadows, T versions, C candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.probe import MEMBERSHIP, Guess, Known, Probe, Sight, Work
from atoll.probes.lira import NumShadows, candidate_shadows, moments
from atoll.probes.loss_threshold import no_round
from atoll.probes.shadows import losses, scaled_confidence

MOST_VERSIONS = 24
"""Versions that are looked at, evenly spread: more give a covariance that few shadows cannot tell."""
RIDGE = 0.1
"""Added to each version's variance of 1, so that versions which are nearly alike do no harm."""


def over_rounds(num_shadows: NumShadows = 32) -> Probe:
    """Compare confidences over the rounds with those of shadows (after Zari et al. 2021, arXiv:2111.00430).

    Where a server saw T versions, phi is a vector of T. Shadow federations give its means with and without each sample,
    mu_in and mu_out, and its spread s. In units of s, all samples share one covariance W and one shift d, the mean of
    (mu_in - mu_out) / s: few shadows tell those well. The score is d^T W^-1 (phi - (mu_in + mu_out) / 2) / s, the log
    likelihood ratio of the two Gaussians (Fisher's discriminant).
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None:
            return []
        spread = torch.linspace(0, len(sights) - 1, min(len(sights), MOST_VERSIONS)).round().long()
        versions = [sights[place].after_M for place in spread.tolist()]
        phi_TC = torch.stack([scaled_confidence(losses(known, each, work.candidates)) for each in versions])
        shadows = candidate_shadows(known, sights, work, num_shadows, versions=True)
        if shadows is None:
            return [Guess(score_C=phi_TC.mean(0))]
        num = phi_TC.shape[1]
        score_C = _discriminant(phi_TC, shadows.phi_STP[:, spread, :num], shadows.inside_SP[:, :num])
        return [Guess(score_C=score_C, notes={"shadows": float(len(shadows.phi_STP)), "versions": float(len(spread))})]

    return Probe(goal=MEMBERSHIP, run=run, why_not=no_round)


def _discriminant(phi_TC: Tensor, phi_STC: Tensor, inside_SC: Tensor) -> Tensor:
    """Return the log likelihood ratio of two Gaussians with a common shift and covariance."""
    (in_TC, var_in_TC), (out_TC, var_out_TC) = (moments(phi_STC, each) for each in (inside_SC, ~inside_SC))
    spread_TC = ((var_in_TC + var_out_TC) / 2).sqrt()
    rest_STC = (phi_STC - torch.where(inside_SC.unsqueeze(1), in_TC, out_TC)) / spread_TC
    rest_TN = rest_STC.transpose(0, 1).flatten(1)
    covariance_TT = rest_TN @ rest_TN.T / rest_TN.shape[1] + RIDGE * torch.eye(len(rest_TN), dtype=rest_TN.dtype)
    shift_T = ((in_TC - out_TC) / spread_TC).mean(1)
    direction_T: Tensor = torch.linalg.solve(covariance_TT, shift_T)
    return direction_T @ ((phi_TC - (in_TC + out_TC) / 2) / spread_TC)
