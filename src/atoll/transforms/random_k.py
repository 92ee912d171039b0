"""Send values at random positions. Shapes: V, the input vector; K, the values of it that are sent."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Count
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import Fraction, Positions, codec, number_kept

EXAMPLES = [{}, {"fraction": 0.5, "error_feedback": True}]


def random_k(fraction: Fraction | None = None, count: Count | None = None, error_feedback: bool = False) -> Transform:
    """Send K values at random positions, by default 1 %, and the seed from which the positions are drawn.

    Without error feedback the values are multiplied by V / K, which makes the decoded vector unbiased; with it they are
    not scaled (Stich et al. 2018, arXiv:1809.07599, definition 2.2). Bytes for float32: 4 K + 16.
    """
    num_kept = number_kept("random_k", fraction, count)
    max_scale = math.inf if count is not None else 1 / (fraction or 0.01)

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        num = vector_V.numel()
        seed, kept = int(encoding.rng.integers(2**63)), num_kept(num)
        carrier_K = vector_V[torch.from_numpy(draw_positions(seed, num, kept))]
        carrier_K = carrier_K if error_feedback else carrier_K * (num / max(1, kept))
        return carrier_K, {"length": torch.tensor([num]), "seed": torch.tensor([seed])}, memory

    def decode(carrier_K: Tensor, side: State) -> Tensor:
        vector_V = torch.zeros(int(side["length"]), dtype=carrier_K.dtype)
        kept_K = draw_positions(int(side["seed"]), vector_V.numel(), carrier_K.numel())
        vector_V[torch.from_numpy(kept_K)] = carrier_K
        return vector_V

    inner = Transform(
        encode=encode,
        decode=decode,
        sensitivity=lambda l2_in: l2_in * max_scale,
        unbiased=not error_feedback,
        contractive=error_feedback,
    )
    return codec("random_k", inner, error_feedback=error_feedback)


def draw_positions(seed: int, num: int, num_kept: int) -> Positions:
    """Draw distinct positions below `num`: the first distinct numbers in the raw stream of a seeded PCG64.

    Client and server must draw the same; NumPy guarantees this stream, but not that of its distributions.
    """
    if not num_kept:
        return np.empty(0, dtype=np.int64)
    if 2 * num_kept > num:
        return np.setdiff1d(np.arange(num), draw_positions(seed, num, num - num_kept), assume_unique=True)
    num_draws = 2 * num_kept
    while True:
        draws = (np.random.PCG64(seed).random_raw(num_draws) % np.uint64(num)).astype(np.int64)
        first = np.unique(draws, return_index=True)[1]
        if len(first) >= num_kept:
            return np.sort(draws[np.sort(first)[:num_kept]])
        num_draws *= 2
