"""Send the largest values. Shapes: V, the input vector; K, the values of it that are sent."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Count
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import Fraction, codec, largest_positions, number_kept, pack_positions, scatter

EXAMPLES = [{}, {"fraction": 0.1, "error_feedback": False}]


def top_k(fraction: Fraction | None = None, count: Count | None = None, error_feedback: bool = True) -> Transform:
    """Send the K values of largest magnitude, by default 1 %, and their positions.

    (Stich et al. 2018, arXiv:1809.07599, definition 2.2; Alistarh et al. 2018, arXiv:1809.10505, algorithm 1.)
    Bytes for float32: 4 K, and about 1.1 K for the positions at 1 %.
    """
    num_kept = number_kept("top_k", fraction, count)

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        num = vector_V.numel()
        kept_K = largest_positions(vector_V, num_kept(num))
        return vector_V[torch.from_numpy(kept_K)], pack_positions(kept_K, num), memory

    inner = Transform(encode=encode, decode=scatter, sensitivity=lambda l2_in: l2_in, contractive=True)
    return codec("top_k", inner, error_feedback=error_feedback)
