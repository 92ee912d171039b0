"""Detection by the distance to the aggregate."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.detection import Decay, Detector, RoundView, Threshold
from atoll.core.options import at_least


def distance(
    reach: Annotated[float, at_least(1, "half of all clients are beyond the median")] = 1.5,
    threshold: Threshold = 0.5,
    decay: Decay = 0.7,
) -> Detector:
    """Measure trust by the distance d to the aggregate: min(1, (reach median / d)^2).

    Half of a round's clients are always within the median, so that fewer than half must be bad. Colluders that stay as
    near as honest clients, such as alie, are not detected.
    """

    def trust(view: RoundView) -> Tensor:
        distance_C = view.comparison.distance_C
        return (reach * distance_C.median() / distance_C.clamp_min(1e-300)).square().clamp(max=1)

    return Detector(trust=trust, threshold=threshold, decay=decay)
