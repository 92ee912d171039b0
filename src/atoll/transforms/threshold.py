"""Send the values above a magnitude. Shapes: V, the vector that comes in; K, the values of it that travel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import codec, positions, spread


def threshold(magnitude: float, error_feedback: bool = True) -> Transform:
    """Send every value of at least this magnitude, and their positions: K differs from round to round.

    (Sahu et al. 2021, arXiv:2108.00951, the hard-threshold sparsifier.) Bytes for float32: 4 K and the positions.
    """
    if not magnitude > 0:
        raise PlanError(f"threshold needs a magnitude above 0, got {magnitude}; to send everything, leave it out")

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        kept_K = np.flatnonzero(~(np.abs(vector_V.numpy()) < magnitude))  # NaN travels, so that it shows
        return vector_V[torch.from_numpy(kept_K)], positions(kept_K, vector_V.numel()), memory

    inner = Transform(encode, spread, sensitivity=lambda l2_in: l2_in)
    return codec("threshold", inner, error_feedback=error_feedback)
