"""Detection by the loss on the server's own samples."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.detection import Decay, Detector, RoundView, Threshold
from atoll.core.options import above


def loss(
    slack: Annotated[float, above(0, "late in training honest updates gain next to nothing")] = 0.1,
    threshold: Threshold = 0.4,
    decay: Decay = 0.7,
) -> Detector:
    """Measure trust by how much an update alone lowers the loss on `server.samples`, relative to the round's median.

    With g the gain and s = slack times the loss before the round, trust = (g + s) / (median g + s), within [0, 1]: the
    idea of Xie et al. 2019, arXiv:1805.10032, definition 2. If the median gain is not above -s, all are trusted.
    """

    def trust(view: RoundView) -> Tensor:
        before = view.loss(None)
        gains_C = before - torch.tensor([view.loss(update_D) for update_D in view.updates_CD], dtype=torch.float64)
        gains_C = gains_C.nan_to_num(nan=-torch.inf)
        reference = float(gains_C.median()) + slack * before
        if not reference > 0:
            return torch.ones_like(gains_C)
        return ((gains_C + slack * before) / reference).clamp(0, 1)

    return Detector(trust=trust, threshold=threshold, decay=decay, needs_loss=True)
