"""Labels of two classes from the lengths of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.probe import SAMPLE_LABELS, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates
from atoll.probes.rows import of_two_classes, rarer


def gradient_norm() -> Probe:
    """Take samples with long gradients for the rarer class, by |g| (Li et al. 2022, arXiv:2102.08504, section 3.1).

    A model that mostly sees one class is surer of it, so that the loss of the others has longer gradients. Lengths are
    compared within a batch.
    """

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        guesses, sign = list[Guess](), 2 * rarer(known) - 1
        for row, sight in enumerate(sights):
            if sight.gradients_N is None:
                continue
            norm_N = sight.gradients_N.flatten(1).double().norm(dim=1)
            score_N = torch.zeros_like(norm_N)
            for step in torch.unique(sight.batch_N):
                behind = sight.batch_N == step
                score_N[behind] = sign * norm_N[behind] / norm_N[behind].mean().clamp(min=1e-300)
            guesses.append(Guess(row=row, score_N=score_N))
        return guesses

    return Probe(
        goal=SAMPLE_LABELS,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=of_two_classes,
        assumes="the server looks at gradients, and knows which of two classes is the rarer one",
    )
