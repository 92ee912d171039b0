"""Sums, products and sorts over a (clients x parameters) matrix, in blocks of columns that fit into the cache.

Shapes: C clients, M output rows, D parameters, B columns of a block. Blocks are distributed over as many threads as
there are cores. Their width depends only on the number of rows, and their results are combined in order, so that the
bits do not depend on the number of threads. Values may be as large as float32 allows: sums of squares are computed in
float64.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_VALUES, MIN_COLUMNS = 1 << 18, 1024
"""Approximate number of values in a block, and the minimum number of its columns."""
RUNS_PER_THREAD = 4
"""Number of batches in which a thread receives its blocks: submitting single blocks takes as long as the work."""
LARGE_MATRIX = 1 << 22
"""Minimum number of values for which float32 products are tried first."""
MIN_RELATIVE_DISTANCE = 0.01
"""Pairs whose squared distance is below this share of their squared norms lose too many digits in float32."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread inside each worker thread: how it splits a sum would change the bits."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def map_blocks(work: Callable[[slice], T], shape: Sequence[int]) -> Iterator[T]:
    """Apply `work` to every block of columns of a matrix; yield the results in the order of the blocks."""
    num_rows, num_columns = shape
    width = max(MIN_COLUMNS, BLOCK_VALUES // max(1, num_rows))
    slices = [slice(start, start + width) for start in range(0, num_columns, width)]
    threads = min(num_cores(), len(slices))
    with _one_thread():
        if threads <= 1:
            yield from map(work, slices)
        else:
            run_length = -(-len(slices) // (RUNS_PER_THREAD * threads))
            runs = [slices[start : start + run_length] for start in range(0, len(slices), run_length)]
            with ThreadPoolExecutor(threads) as pool:
                for results in pool.map(lambda run: [work(columns) for columns in run], runs):
                    yield from results


def _run_blocks(work: Callable[[slice], None], shape: Sequence[int]) -> None:
    for _ in map_blocks(work, shape):
        pass


def _sum_blocks(work: Callable[[slice], Tensor], shape: Sequence[int]) -> Tensor:
    """Sum the results of all blocks in float64, in the order of the blocks."""
    return reduce(Tensor.add_, (part.double() for part in map_blocks(work, shape)))


def reduce_sorted_columns(rows_CD: Tensor, rule: Callable[[Array], Array], selected: list[int] | None = None) -> Tensor:
    """Reduce each column to one value, over all rows or the selected ones.

    `rule` maps an array (B, C) of columns, each sorted in ascending order, to one value for each, (B,).
    """
    values = rows_CD.detach().numpy()
    result_D = np.empty(values.shape[1], dtype=values.dtype)

    def work(columns: slice) -> None:
        block_CB = values[:, columns] if selected is None else values[selected, columns]
        block_BC = np.array(block_CB.T, order="C")
        block_BC.sort(axis=1)
        result_D[columns] = rule(block_BC)

    _run_blocks(work, values.shape)
    return torch.from_numpy(result_D)


def gram_matrix(rows_CD: Tensor) -> Tensor:
    """Return the inner products of all pairs of rows, (C, C), to about the precision of float64.

    Large matrices are first multiplied in float32, which is nearly three times as fast; that result is kept if it
    separates all pairs of rows well enough.
    """
    if rows_CD.numel() >= LARGE_MATRIX and rows_CD.dtype == torch.float32:
        gram_CC = _gram_matrix(rows_CD, torch.float32)
        square_C = gram_CC.diagonal()
        sum_CC = square_C[:, None] + square_C[None]
        distance_CC = (sum_CC - 2 * gram_CC).fill_diagonal_(torch.inf)
        if bool(gram_CC.isfinite().all()) and bool((distance_CC > MIN_RELATIVE_DISTANCE * sum_CC).all()):
            return gram_CC
    return _gram_matrix(rows_CD, torch.float64)


def _float64_converter() -> Callable[[Tensor], Tensor]:
    """Return a function that copies a block to float64, into one buffer per thread: new memory costs more time."""
    local = threading.local()

    def to_float64(block_CB: Tensor) -> Tensor:
        buffer_CB: Tensor | None = getattr(local, "buffer_CB", None)
        if buffer_CB is None or buffer_CB.shape != block_CB.shape:
            buffer_CB = local.buffer_CB = torch.empty(block_CB.shape, dtype=torch.float64)
        return buffer_CB.copy_(block_CB)

    return to_float64


def _gram_matrix(rows_CD: Tensor, dtype: torch.dtype) -> Tensor:
    to_float64 = _float64_converter()

    def work(columns: slice) -> Tensor:
        block_CB = rows_CD[:, columns] if rows_CD.dtype == dtype else to_float64(rows_CD[:, columns])
        return block_CB @ block_CB.T

    return _sum_blocks(work, rows_CD.shape)


def row_norms(rows_CD: Tensor, centre_D: Tensor | None = None) -> Tensor:
    """Return the L2 norm of every row, or its distance to a centre, (C,) in float64."""
    to_float64 = _float64_converter()

    def work(columns: slice) -> Tensor:
        block_CB = to_float64(rows_CD[:, columns])
        block_CB = block_CB if centre_D is None else block_CB.sub_(centre_D[columns])
        return block_CB.square_().sum(1)

    return _sum_blocks(work, rows_CD.shape).sqrt()


def inner_products(rows_CD: Tensor, direction_D: Tensor) -> Tensor:
    """Return the inner product of every row with one vector, (C,) in float64."""
    to_float64 = _float64_converter()

    def work(columns: slice) -> Tensor:
        return to_float64(rows_CD[:, columns]) @ direction_D[columns].double()

    return _sum_blocks(work, rows_CD.shape)


def weighted_sum(share_C: Tensor, rows_CD: Tensor) -> Tensor:
    """Return the sum of the rows, each multiplied by its share, (D,)."""
    return weighted_sums(share_C[None], rows_CD)[0]


def weighted_sums(share_MC: Tensor, rows_CD: Tensor) -> Tensor:
    """Return one weighted sum of the rows for each row of shares, (M, D)."""
    share_MC = share_MC.to(rows_CD.dtype)
    sum_MD = rows_CD.new_empty(len(share_MC), rows_CD.shape[1])

    def work(columns: slice) -> None:
        sum_MD[:, columns] = share_MC @ rows_CD[:, columns]

    _run_blocks(work, rows_CD.shape)
    return sum_MD
