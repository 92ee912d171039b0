"""DRIVE and EDEN: a rotation, a few bits a coordinate and one scale a block.

Shapes: V values, rotated as N blocks of B coordinates.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Range
from atoll.core.transform import Encoding, Transform, needs_floats
from atoll.transforms.bits import pack_bits, unpack_bits
from atoll.transforms.rotate import LARGEST_BLOCK, blocks, rotated, rotated_back

TIMES = 2
"""One Hadamard matrix leaves a block with one large value biased: its signs then say nothing of the others."""

EXAMPLES = [{}, {"bits": 3, "scale": "least_squares"}]


def eden(
    bits: Annotated[int, Range(1, 4, hint="for more use rotate and quantise")] = 1,
    scale: Literal["unbiased", "least_squares"] = "unbiased",
) -> Transform:
    """Send the nearest of 2^b points c_i for each coordinate of y = Rx, and decode as S R^T c.

    With one bit c is the sign, and this is DRIVE (Vargaftik et al. 2021, arXiv:2105.08339): S = |x|^2 / |y|_1 is
    unbiased, S = |y|_1 / B has the least error but shrinks. With more bits it is EDEN (Vargaftik et al. 2022,
    arXiv:2108.08842): c are the best points for normal values, S = |x|^2 / <y, c> or <y, c> / |c|^2. Each client draws
    its own signs, since it is in the mean over R that S is unbiased.
    """
    points = normal_points(bits)
    growth = float(points[-1] / points[2 ** (bits - 1)]) * LARGEST_BLOCK**0.5 if scale == "unbiased" else 1.0

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("eden", vector_V)
        seed = int(encoding.rng.integers(2**63))
        y_BN = rotated(vector_V, seed, TIMES)
        unit_N = (y_BN.square().sum(0) / len(y_BN)).sqrt()
        y_BN /= torch.where(unit_N == 0, 1.0, unit_N)
        codes_BN, c_BN = _nearest(y_BN, points)
        dot_N = (y_BN * c_BN).sum(0)
        best_N = len(y_BN) / dot_N if scale == "unbiased" else dot_N / c_BN.square().sum(0)
        scale_N = torch.where(unit_N == 0, 0.0, unit_N * best_N)
        side = {"scale": scale_N, "seed": torch.tensor(seed), "length": torch.tensor(len(vector_V))}
        return pack_bits(codes_BN.view(-1), bits), side, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        shape = blocks(int(side["length"]))
        codes_BN = unpack_bits(carrier, bits, shape[0] * shape[1]).view(shape)
        y_BN = _points_of(codes_BN, points, side["scale"].dtype).mul_(side["scale"])
        return rotated_back(y_BN, int(side["seed"]), int(side["length"]), TIMES)

    exact_mean = scale == "unbiased"
    return Transform(
        encode, decode, sensitivity=lambda l2_in: growth * l2_in, unbiased=exact_mean, contractive=not exact_mean
    )


@cache
def normal_points(bits: int) -> Tensor:
    """The 2^b points with the least squared error for normal values (Lloyd-Max), by iterating means of cells.

    >>> round(float(normal_points(1)[1]) ** 2 * torch.pi, 9)
    2.0
    """
    points: Tensor = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    outside = torch.tensor([torch.inf], dtype=torch.float64)
    for _ in range(1000):
        edges = torch.cat([-outside, _boundaries(points), outside])
        density = (-edges.square() / 2).exp() / (2 * torch.pi) ** 0.5
        points = -density.diff() / torch.special.ndtr(edges).diff()
    return points


def _nearest(y_BN: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the nearest point, and the point; a comparison for each boundary, as there are few."""
    codes_BN = torch.zeros(y_BN.shape, dtype=torch.uint8)
    for boundary in _boundaries(points).tolist():
        codes_BN += y_BN > boundary
    return codes_BN, _points_of(codes_BN, points, y_BN.dtype)


def _points_of(codes_BN: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
    if len(points) == 2:  # -c and c
        return codes_BN.to(dtype).mul_(2 * float(points[1])).sub_(float(points[1]))
    return points.to(dtype).index_select(0, codes_BN.view(-1).int()).view(codes_BN.shape)


def _boundaries(points: Tensor) -> Tensor:
    """Halfway between neighbours."""
    return (points[1:] + points[:-1]) / 2
