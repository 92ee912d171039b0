"""Trust by the direction of an update."""

from __future__ import annotations

from torch import Tensor

from atoll.core.detection import Decay, Detector, Sight, Threshold


def cosine(threshold: Threshold = 0.4, decay: Decay = 0.7) -> Detector:
    """Trust by the angle between an update and the aggregate: (1 + cos) / 2.

    It is 1/2 for an update at a right angle, so that a threshold below that catches those who pull backwards (compare
    Cao et al. 2021, arXiv:2012.13995, equation 2, where the server's own update stands for the aggregate). It is of use
    only while the aggregate points the right way: put it behind a robust rule.
    """

    def trust(sight: Sight) -> Tensor:
        return (1 + sight.seen.cosine_C) / 2

    return Detector(trust, threshold, decay)
