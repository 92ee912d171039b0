"""Detection by the direction of an update."""

from __future__ import annotations

from torch import Tensor

from atoll.core.detection import Decay, Detector, RoundView, Threshold


def cosine(threshold: Threshold = 0.4, decay: Decay = 0.7) -> Detector:
    """Measure trust by the angle between an update and the aggregate: (1 + cos) / 2.

    Trust is 1/2 for an update at a right angle, so that a threshold below it finds clients that point backwards
    (compare Cao et al. 2021, arXiv:2012.13995, equation 2, with the server's own update in place of the aggregate). It
    is useful only if the aggregate points in the right direction: combine it with a robust rule.
    """

    def trust(view: RoundView) -> Tensor:
        return (1 + view.comparison.cosine_C) / 2

    return Detector(trust=trust, threshold=threshold, decay=decay)
