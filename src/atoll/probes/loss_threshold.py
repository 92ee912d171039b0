"""Membership by the loss of the last version."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.probe import MEMBERSHIP, Guess, Known, Probe, Sight, Work
from atoll.probes.shadows import losses


def loss_threshold() -> Probe:
    """Take samples of small loss for members: score = -loss(last version, sample) (Yeom et al. 2018, arXiv:1709.01604).

    This is adversary 1 of section 3.2, with every threshold at once.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None:
            return []
        return [Guess(score_C=-losses(known, sights[-1].after_M, work.candidates))]

    return Probe(goal=MEMBERSHIP, run=run, why_not=no_round)


def no_round(known: Known, sights: Sequence[Sight]) -> str | None:
    """Return why nothing can be said of membership: no model was made."""
    return None if sights else "no round came to an end, so there is no trained model that could tell on anybody"
