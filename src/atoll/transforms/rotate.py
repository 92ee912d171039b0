"""A random rotation that spreads every value over many coordinates, so that a later quantiser loses less.

Shapes: V values, padded with fewer than B zeros to N blocks of B, a power of two; T rotations. Block n holds
the values n, n + N, n + 2N, ..., a sample of the whole vector, so that all blocks have similar ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Seed
from atoll.core.seeds import derive
from atoll.core.transform import Encoding, Transform, needs_floats

LARGEST_BLOCK = 4096
"""Maximum number of values in a block."""
CHUNK = 131072
"""Number of values rotated at once, so that they stay in the cache."""


def rotate(seed: Seed = 0) -> Transform:
    """Multiply by random signs and the Hadamard matrix: H D v / sqrt(B) (Suresh et al. 2017, arXiv:1611.00429, 3).

    As in the paper the signs are public and the same for all clients of an attempt, so that sums of rotated vectors can
    be rotated back.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("rotate", vector_V)
        signs = derive(seed, "rotate", encoding.attempt)
        side = {"seed": torch.tensor(signs), "length": torch.tensor(len(vector_V))}
        return rotate_blocks(vector_V, signs).view(-1), side, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        return unrotate_blocks(carrier, int(side["seed"]), int(side["length"]))

    return Transform(
        encode=encode, decode=decode, linear=True, sensitivity=lambda l2_in: l2_in, unbiased=True, contractive=True
    )


def block_shape(num_values: int) -> tuple[int, int]:
    """Return the size and number of blocks: 4096 values, or fewer in short vectors.

    Above 512 values the padding adds at most an eighth.

    >>> block_shape(5), block_shape(5000), block_shape(10_000_000)
    ((8, 1), (512, 10), (4096, 2442))
    """
    next_power = 1 << max(num_values - 1, 0).bit_length()
    size = min(LARGEST_BLOCK, max(1 << max(num_values.bit_length() - 4, 0), min(64, next_power)))
    return size, -(-num_values // size)


def rotate_blocks(vector_V: Tensor, seed: int, times: int = 1) -> Tensor:
    """Rotate every block `times` times; return the blocks as columns, (B, N)."""
    blocks_BN = torch.zeros(block_shape(len(vector_V)), dtype=vector_V.dtype)
    blocks_BN.view(-1)[: len(vector_V)] = vector_V
    for chunk_BN, signs_TBN in _chunks(blocks_BN, seed, times):
        y_BN = chunk_BN
        for signs_BN in signs_TBN:
            y_BN = hadamard(y_BN * signs_BN)
        chunk_BN.copy_(y_BN)
    return blocks_BN


def unrotate_blocks(rotated_BN: Tensor, seed: int, num_values: int, times: int = 1) -> Tensor:
    """Invert `rotate_blocks`; return the vector (V,)."""
    blocks_BN = rotated_BN.reshape(block_shape(num_values)).clone()
    for chunk_BN, signs_TBN in _chunks(blocks_BN, seed, times):
        y_BN = chunk_BN
        for signs_BN in signs_TBN.flip(0):
            y_BN = hadamard(y_BN).mul_(signs_BN)
        chunk_BN.copy_(y_BN)
    return blocks_BN.view(-1)[:num_values]


def hadamard(x_BN: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of each column, by log2(B) butterflies of sum and difference."""
    x_BN = x_BN * len(x_BN) ** -0.5
    y_BN = torch.empty_like(x_BN)
    stride = 1
    while stride < len(x_BN):
        x, y = x_BN.view(-1, 2, stride * x_BN.shape[1]), y_BN.view(-1, 2, stride * x_BN.shape[1])
        torch.add(x[:, 0], x[:, 1], out=y[:, 0])
        torch.sub(x[:, 0], x[:, 1], out=y[:, 1])
        x_BN, y_BN, stride = y_BN, x_BN, 2 * stride
    return x_BN


def _chunks(blocks_BN: Tensor, seed: int, times: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield groups of n blocks, each with a random ±1 for every value and rotation, (T, B, n)."""
    source = np.random.PCG64(seed)
    for chunk_BN in torch.split(blocks_BN, max(1, CHUNK // len(blocks_BN)), 1):
        num = times * chunk_BN.numel()
        bits = np.unpackbits(source.random_raw(-(-num // 64)).view(np.uint8), count=num)
        signs = torch.from_numpy(bits).to(blocks_BN.dtype).mul_(-2).add_(1)
        yield chunk_BN, signs.view(times, *chunk_BN.shape)
