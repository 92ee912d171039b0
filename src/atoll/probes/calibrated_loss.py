"""Membership by how much smaller a loss is than that of models trained elsewhere. Shapes: S models, P pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.core.options import Count
from atoll.core.probe import MEMBERSHIP, Guess, Known, Probe, Samples, Sight, Work
from atoll.probes.loss_threshold import no_round
from atoll.probes.shadows import losses, scaled_confidence, train_shadows


def calibrated_loss(num_models: Count = 8) -> Probe:
    """Score samples by the loss of models trained elsewhere, minus the loss (Watson et al. 2022, arXiv:2111.08440).

    s(x) = mean over k of loss(model k, x) - loss(last version, x), eq. 3: a sample that every model finds easy is no
    member for that. The other models are trained on samples that no client holds, as the plan trains; losses are taken
    on the scale of log(p / (1 - p)), which keeps apart those that are nearly 0.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None:
            return []
        phi_C = scaled_confidence(losses(known, sights[-1].after_M, work.candidates))
        pool = joined(work.candidates, known.elsewhere)
        inside_SP = elsewhere_only(num_models, len(work.candidates.x), known, work.rng)
        shadows = train_shadows(known, sights, pool, inside_SP, work)
        if shadows is None:
            return [Guess(score_C=phi_C)]
        reference_C = shadows.phi_STP[:, -1, : len(phi_C)].mean(0)
        return [Guess(score_C=phi_C - reference_C, notes={"models": float(len(shadows.phi_STP))})]

    return Probe(goal=MEMBERSHIP, run=run, why_not=no_samples_elsewhere)


def no_samples_elsewhere(known: Known, sights: Sequence[Sight]) -> str | None:
    """Return why no model can be trained elsewhere."""
    if len(known.elsewhere.x) < known.num_clients:
        return (
            f"an attacker would train models of its own on samples from elsewhere, and has {len(known.elsewhere.x)}, "
            f"fewer than the {known.num_clients} clients"
        )
    return no_round(known, sights)


def joined(first: Samples, second: Samples) -> Samples:
    """Return both sets of samples as one, the first in front."""
    return Samples(torch.cat([first.x, second.x]), torch.cat([first.y, second.y]))


def elsewhere_only(num_models: int, num_candidates: int, known: Known, rng: np.random.Generator) -> Tensor:
    """Return which samples of the pool each model is trained on: none of the candidates, as many as clients have."""
    num = min(known.num_train, max(1, len(known.elsewhere.x) // 2))
    inside_SP = torch.zeros(num_models, num_candidates + len(known.elsewhere.x), dtype=torch.bool)
    for row in inside_SP:
        row[num_candidates + torch.from_numpy(rng.permutation(len(known.elsewhere.x))[:num])] = True
    return inside_SP
