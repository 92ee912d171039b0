"""DRIVE and EDEN: a rotation, a few bits per coordinate and one scale per block.

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
from atoll.transforms.rotate import LARGEST_BLOCK, block_shape, rotate_blocks, unrotate_blocks

NUM_ROTATIONS = 2
"""One rotation leaves a block with one large value biased: its signs then depend on that value alone."""

EXAMPLES = [{}, {"bits": 3, "scale": "least_squares"}]


def eden(
    bits: Annotated[int, Range(1, 4, hint="for more use rotate and quantise")] = 1,
    scale: Literal["unbiased", "least_squares"] = "unbiased",
) -> Transform:
    """Send the nearest of 2^b points c_i for each coordinate of the rotated y = Rx, and decode as S R^T c.

    With one bit c is the sign, and this is DRIVE (Vargaftik et al. 2021, arXiv:2105.08339): S = |x|^2 / |y|_1 is
    unbiased, S = |y|_1 / B has the least error but shrinks. With more bits it is EDEN (Vargaftik et al. 2022,
    arXiv:2108.08842): c are the best points for normal values, S = |x|^2 / <y, c> or <y, c> / |c|^2. Each client draws
    its own rotation R, because S is unbiased in the mean over R.
    """
    points = normal_points(bits)
    growth = float(points[-1] / points[2 ** (bits - 1)]) * LARGEST_BLOCK**0.5 if scale == "unbiased" else 1.0

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("eden", vector_V)
        seed = int(encoding.rng.integers(2**63))
        y_BN = rotate_blocks(vector_V, seed, NUM_ROTATIONS)
        unit_N = (y_BN.square().sum(0) / len(y_BN)).sqrt()
        y_BN /= torch.where(unit_N == 0, 1.0, unit_N)
        codes_BN, c_BN = _nearest(y_BN, points)
        dot_N = (y_BN * c_BN).sum(0)
        best_N = len(y_BN) / dot_N if scale == "unbiased" else dot_N / c_BN.square().sum(0)
        scale_N = torch.where(unit_N == 0, 0.0, unit_N * best_N)
        side = {"scale": scale_N, "seed": torch.tensor(seed), "length": torch.tensor(len(vector_V))}
        return pack_bits(codes_BN.view(-1), bits), side, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        shape = block_shape(int(side["length"]))
        codes_BN = unpack_bits(carrier, bits, shape[0] * shape[1]).view(shape)
        y_BN = _points_of(codes_BN, points, side["scale"].dtype).mul_(side["scale"])
        return unrotate_blocks(y_BN, int(side["seed"]), int(side["length"]), NUM_ROTATIONS)

    unbiased = scale == "unbiased"
    return Transform(
        encode=encode,
        decode=decode,
        sensitivity=lambda l2_in: growth * l2_in,
        unbiased=unbiased,
        contractive=not unbiased,
    )


@cache
def normal_points(bits: int) -> Tensor:
    """Return the 2^b points with the least squared error for normal values (Lloyd-Max), by iterating means of cells.

    >>> round(float(normal_points(1)[1]) ** 2 * torch.pi, 9)
    2.0
    """
    points: Tensor = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    infinity = torch.tensor([torch.inf], dtype=torch.float64)
    for _ in range(1000):
        edges = torch.cat([-infinity, _boundaries(points), infinity])
        density = (-edges.square() / 2).exp() / (2 * torch.pi) ** 0.5
        points = -density.diff() / torch.special.ndtr(edges).diff()
    return points


def _nearest(y_BN: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the nearest point and the point, by one comparison for each of the few boundaries."""
    codes_BN = torch.zeros(y_BN.shape, dtype=torch.uint8)
    for boundary in _boundaries(points).tolist():
        codes_BN += y_BN > boundary
    return codes_BN, _points_of(codes_BN, points, y_BN.dtype)


def _points_of(codes_BN: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
    if len(points) == 2:  # -c and c
        return codes_BN.to(dtype).mul_(2 * float(points[1])).sub_(float(points[1]))
    return points.to(dtype).index_select(0, codes_BN.view(-1).int()).view(codes_BN.shape)


def _boundaries(points: Tensor) -> Tensor:
    """Return the midpoints between neighbouring points."""
    return (points[1:] + points[:-1]) / 2
