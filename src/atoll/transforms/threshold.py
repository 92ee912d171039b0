"""Send the values above a magnitude. Shapes: V, the input vector; K, the values of it that are sent."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import above
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import codec, pack_positions, scatter

EXAMPLES = [{"magnitude": 1e-3}, {"magnitude": 1e-2, "error_feedback": False}]


def threshold(
    magnitude: Annotated[float, above(0, "to send everything, leave it out")], error_feedback: bool = True
) -> Transform:
    """Send every value of at least this magnitude, and their positions: K differs from round to round.

    (Sahu et al. 2021, arXiv:2108.00951, the hard-threshold sparsifier.) Bytes for float32: 4 K and the positions.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        kept_K = np.flatnonzero(~(np.abs(vector_V.numpy()) < magnitude))  # NaN is sent, so that the server rejects it
        return vector_V[torch.from_numpy(kept_K)], pack_positions(kept_K, vector_V.numel()), memory

    inner = Transform(encode=encode, decode=scatter, sensitivity=lambda l2_in: l2_in, contractive=True)
    return codec("threshold", inner, error_feedback=error_feedback)
