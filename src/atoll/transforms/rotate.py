"""A random rotation that spreads every value over many, so that a range or a sign says more.

Shapes: V values, padded with zeros to B * N: N blocks of B, a power of two; T times of rotating. Block n holds
the values n, n + N, n + 2N, ..., a sample of the whole vector, so blocks are much alike; fewer than B zeros are added.
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
CHUNK = 131072
"""Values that are rotated at once, so that they stay in the cache."""


def rotate(seed: Seed = 0) -> Transform:
    """Multiply by random signs and the Hadamard matrix: H D v / sqrt(B) (Suresh et al. 2017, arXiv:1611.00429, 3).

    As in the paper the signs are public and the same for all clients that were asked together (one attempt), so sums of
    rotated vectors can be rotated back.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("rotate", vector_V)
        signs = derive(seed, "rotate", encoding.attempt)
        side = {"seed": torch.tensor(signs), "length": torch.tensor(len(vector_V))}
        return rotated(vector_V, signs).view(-1), side, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        return rotated_back(carrier, int(side["seed"]), int(side["length"]))

    return Transform(encode, decode, linear=True, sensitivity=lambda l2_in: l2_in, unbiased=True, contractive=True)


def blocks(num_values: int) -> tuple[int, int]:
    """Size and number of the blocks: 4096 values, fewer in short vectors, where zeros add an eighth at most above 512.

    >>> blocks(5), blocks(5000), blocks(10_000_000)
    ((8, 1), (512, 10), (4096, 2442))
    """
    whole = 1 << max(num_values - 1, 0).bit_length()
    size = min(LARGEST_BLOCK, max(1 << max(num_values.bit_length() - 4, 0), min(64, whole)))
    return size, -(-num_values // size)


def rotated(vector_V: Tensor, seed: int, times: int = 1) -> Tensor:
    """Rotate every block so many times; the blocks (B, N) are columns."""
    blocks_BN = torch.zeros(blocks(len(vector_V)), dtype=vector_V.dtype)
    blocks_BN.view(-1)[: len(vector_V)] = vector_V
    for some_BN, signs_TBN in _chunks(blocks_BN, seed, times):
        y_BN = some_BN
        for signs_BN in signs_TBN:
            y_BN = hadamard(y_BN * signs_BN)
        some_BN.copy_(y_BN)
    return blocks_BN


def rotated_back(rotated_BN: Tensor, seed: int, num_values: int, times: int = 1) -> Tensor:
    """Undo `rotated`."""
    blocks_BN = rotated_BN.reshape(blocks(num_values)).clone()
    for some_BN, signs_TBN in _chunks(blocks_BN, seed, times):
        y_BN = some_BN
        for signs_BN in signs_TBN.flip(0):
            y_BN = hadamard(y_BN).mul_(signs_BN)
        some_BN.copy_(y_BN)
    return blocks_BN.view(-1)[:num_values]


def hadamard(x_BN: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each column, by butterflies: log2(B) sums and differences."""
    x_BN = x_BN * len(x_BN) ** -0.5
    y_BN = torch.empty_like(x_BN)
    apart = 1
    while apart < len(x_BN):
        x, y = x_BN.view(-1, 2, apart * x_BN.shape[1]), y_BN.view(-1, 2, apart * x_BN.shape[1])
        torch.add(x[:, 0], x[:, 1], out=y[:, 0])
        torch.sub(x[:, 0], x[:, 1], out=y[:, 1])
        x_BN, y_BN, apart = y_BN, x_BN, 2 * apart
    return x_BN


def _chunks(blocks_BN: Tensor, seed: int, times: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some blocks at a time, each with random ±1 for every value and time (T, B, n)."""
    source = np.random.PCG64(seed)
    for some_BN in torch.split(blocks_BN, max(1, CHUNK // len(blocks_BN)), 1):
        num = times * some_BN.numel()
        bits = np.unpackbits(source.random_raw(-(-num // 64)).view(np.uint8), count=num)
        signs = torch.from_numpy(bits).to(blocks_BN.dtype).mul_(-2).add_(1)
        yield some_BN, signs.view(times, *some_BN.shape)
