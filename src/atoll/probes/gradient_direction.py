"""Labels of two classes from the directions of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.probe import SAMPLE_LABELS, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates
from atoll.probes.rows import of_two_classes, rarer


def gradient_direction() -> Probe:
    """Part a batch by the cosine of gradients (Li et al. 2022, arXiv:2102.08504, section 3.2).

    Gradients of one class point the same way, and those of the other the opposite way. The paper compares with the
    gradient of a sample whose label is known; here the direction is the first right singular vector of the batch's unit
    gradients, and the side that has fewer samples is the rarer class: no label needs to be known.
    """

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        guesses, sign = list[Guess](), 2 * rarer(known) - 1
        for row, sight in enumerate(sights):
            if sight.gradients_N is None:
                continue
            score_N = torch.zeros(len(sight.batch_N), dtype=torch.float64)
            for step in torch.unique(sight.batch_N):
                behind = sight.batch_N == step
                score_N[behind] = sign * cosines(sight.gradients_N[behind].flatten(1).double())
            guesses.append(Guess(row=row, score_N=score_N))
        return guesses

    return Probe(
        goal=SAMPLE_LABELS,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=of_two_classes,
        assumes="the server looks at gradients, and knows which of two classes is the rarer one",
    )


def cosines(grads_B: Tensor) -> Tensor:
    """Return each gradient's cosine with the batch's main direction, positive on the side that has fewer samples."""
    unit_B = grads_B / grads_B.norm(dim=1, keepdim=True).clamp(min=1e-300)
    main = torch.linalg.svd(unit_B, full_matrices=False).Vh[0]
    cosine_B: Tensor = unit_B @ main
    few = (cosine_B > 0).double().mean() < 0.5
    return cosine_B if bool(few) else -cosine_B
