"""Send low-rank factors of matrices. Shapes: V, the vector; N x M a matrix in it, as P (N, R) times Q (M, R)^T."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Count
from atoll.core.params import ParamSpec
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import codec, needs_all_params

EXAMPLES = [{}, {"rank": 1, "error_feedback": False}]


class _Matrix(NamedTuple):
    offset: int
    rows: int
    columns: int
    rank: int


def low_rank(rank: Count = 2, error_feedback: bool = True) -> Transform:
    """Send each matrix of the model as a product of rank R by one step of power iteration: PowerSGD.

        P = orthonormal(M Q),  Q' = M^T P,  decoded = P Q'^T

    (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2). Q is random in a client's first round and its last Q'
    afterwards. A convolution is treated as the matrix of its output channels by the other dimensions. Tensors that
    would not get smaller, and extra vectors, are sent unchanged. Bytes for float32: 4 R (N + M) + 16 per matrix.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_all_params("low_rank", vector_V, encoding)
        matrices = _matrices(encoding.spec, rank)
        sizes = [m.columns * m.rank for m in matrices]
        start = memory["q"] if memory else torch.from_numpy(encoding.rng.standard_normal(sum(sizes)))
        start = start.to(vector_V.dtype, copy=True)  # the bits of a product depend on the memory alignment of factors
        factors: list[Tensor] = []
        for matrix, q in zip(matrices, torch.split(start, sizes), strict=True):
            values_NM = _view(vector_V, matrix)
            p_NR = torch.linalg.qr(values_NM @ q.view(matrix.columns, matrix.rank)).Q
            factors += [p_NR.flatten(), (values_NM.T @ p_NR).flatten()]
        carrier = torch.cat([*factors, vector_V[_outside(vector_V.numel(), matrices)]])
        side = {"matrices": torch.tensor(matrices, dtype=torch.int32).view(-1, 4)}
        return carrier, side, {"q": torch.cat(factors[1::2])} if matrices else memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        matrices = [_Matrix(*row) for row in side["matrices"].tolist()]
        sizes = [size for m in matrices for size in (m.rows * m.rank, m.columns * m.rank)]
        *factors, others = torch.split(carrier, [*sizes, carrier.numel() - sum(sizes)])
        vector_V = carrier.new_empty(others.numel() + sum(m.rows * m.columns for m in matrices))
        vector_V[_outside(vector_V.numel(), matrices)] = others
        for matrix, p, q in zip(matrices, factors[::2], factors[1::2], strict=True):
            p_NR, q_MR = p.view(matrix.rows, matrix.rank), q.view(matrix.columns, matrix.rank)
            torch.mm(p_NR, q_MR.T, out=_view(vector_V, matrix))
        return vector_V

    inner = Transform(
        encode=encode, decode=decode, sensitivity=lambda l2_in: l2_in, preserves_norm=False, contractive=True
    )
    return codec("low_rank", inner, error_feedback=error_feedback)


def _matrices(spec: ParamSpec, rank: int) -> list[_Matrix]:
    """Return the tensors that a product of this rank makes smaller, as matrices."""
    matrices = [
        _Matrix(s.offset, s.shape[0], s.size // s.shape[0], rank) for s in spec.slots if len(s.shape) > 1 and s.size
    ]
    return [m for m in matrices if rank * (m.rows + m.columns) < m.rows * m.columns]


def _view(vector_V: Tensor, matrix: _Matrix) -> Tensor:
    size = matrix.rows * matrix.columns
    return vector_V[matrix.offset : matrix.offset + size].view(matrix.rows, matrix.columns)


def _outside(num: int, matrices: list[_Matrix]) -> Tensor:
    """Return a mask of the values that belong to no matrix, (V,)."""
    outside_V = torch.ones(num, dtype=torch.bool)
    for matrix in matrices:
        outside_V[matrix.offset : matrix.offset + matrix.rows * matrix.columns] = False
    return outside_V
