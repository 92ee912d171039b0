"""Sums, products and sorts over a (clients x parameters) matrix, in blocks of columns that fit into the cache.

Shapes: C clients, M rows that come out, D parameters, B columns of a block. Blocks are shared out to as many threads as
there are cores. Their width follows from the number of rows, and their results are put together in order, so that the
bits are the same whatever the number of threads. Values may be as large as float32 allows: sums of squares are taken in
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

VALUES, NARROWEST = 1 << 18, 1024
"""A block has about so many values, but at least so many columns."""
RUNS = 4
"""A thread gets its blocks in so many runs: handing them over one by one takes as long as the work itself."""
LARGE = 1 << 22
"""Matrices with so many values or more are worth a try in float32."""
WELL_APART = 0.01
"""Rows whose squared distance is below this share of their squared lengths lose too many digits in float32."""


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread in each of ours: how it splits a sum would change the bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def over_blocks(work: Callable[[slice], T], shape: Sequence[int]) -> Iterator[T]:
    """Do the work of every block of columns of a matrix; what it gives comes in the order of the blocks."""
    num_rows, num_columns = shape
    width = max(NARROWEST, VALUES // max(1, num_rows))
    slices = [slice(start, start + width) for start in range(0, num_columns, width)]
    threads = min(num_cores(), len(slices))
    with _one_thread():
        if threads <= 1:
            yield from map(work, slices)
        else:
            several = -(-len(slices) // (RUNS * threads))
            runs = [slices[start : start + several] for start in range(0, len(slices), several)]
            with ThreadPoolExecutor(threads) as pool:
                for found in pool.map(lambda run: [work(columns) for columns in run], runs):
                    yield from found


def _done(work: Callable[[slice], None], shape: Sequence[int]) -> None:
    for _ in over_blocks(work, shape):
        pass


def _summed(work: Callable[[slice], Tensor], shape: Sequence[int]) -> Tensor:
    """The sum over the blocks in float64, in their order."""
    return reduce(Tensor.add_, (part.double() for part in over_blocks(work, shape)))


def by_sorted_columns(rows_CD: Tensor, rule: Callable[[Array], Array], picked: list[int] | None = None) -> Tensor:
    """Make one value of each column, of all rows or those picked.

    `rule` gets columns as the rows of an array (B, C), each sorted upwards.
    """
    values = rows_CD.detach().numpy()
    found_D = np.empty(values.shape[1], dtype=values.dtype)

    def work(columns: slice) -> None:
        block_CB = values[:, columns] if picked is None else values[picked, columns]
        block_BC = np.array(block_CB.T, order="C")
        block_BC.sort(axis=1)
        found_D[columns] = rule(block_BC)

    _done(work, values.shape)
    return torch.from_numpy(found_D)


def products(rows_CD: Tensor) -> Tensor:
    """The inner products of all pairs of rows, (C, C), good to about float64.

    Large matrices are multiplied in float32 first, which is nearly three times as fast, and that is kept where it tells
    all pairs of rows well apart.
    """
    if rows_CD.numel() >= LARGE and rows_CD.dtype == torch.float32:
        found_CC = _products(rows_CD, torch.float32)
        square_C = found_CC.diagonal()
        sum_CC = square_C[:, None] + square_C[None]
        apart_CC = (sum_CC - 2 * found_CC).fill_diagonal_(torch.inf)
        if bool(found_CC.isfinite().all()) and bool((apart_CC > WELL_APART * sum_CC).all()):
            return found_CC
    return _products(rows_CD, torch.float64)


def _widener() -> Callable[[Tensor], Tensor]:
    """Gives blocks in float64, each in the memory that its thread had for the last: fresh memory costs more time."""
    own = threading.local()

    def wide(block_CB: Tensor) -> Tensor:
        room_CB: Tensor | None = getattr(own, "room_CB", None)
        if room_CB is None or room_CB.shape != block_CB.shape:
            room_CB = own.room_CB = torch.empty(block_CB.shape, dtype=torch.float64)
        return room_CB.copy_(block_CB)

    return wide


def _products(rows_CD: Tensor, dtype: torch.dtype) -> Tensor:
    wide = _widener()

    def work(columns: slice) -> Tensor:
        block_CB = rows_CD[:, columns] if rows_CD.dtype == dtype else wide(rows_CD[:, columns])
        return block_CB @ block_CB.T

    return _summed(work, rows_CD.shape)


def lengths(rows_CD: Tensor, centre_D: Tensor | None = None) -> Tensor:
    """The L2 norm of every row, or its distance to a centre, (C,) in float64."""
    wide = _widener()

    def work(columns: slice) -> Tensor:
        block_CB = wide(rows_CD[:, columns])
        block_CB = block_CB if centre_D is None else block_CB.sub_(centre_D[columns])
        return block_CB.square_().sum(1)

    return _summed(work, rows_CD.shape).sqrt()


def along(rows_CD: Tensor, direction_D: Tensor) -> Tensor:
    """The inner product of every row with one vector, (C,) in float64."""
    wide = _widener()

    def work(columns: slice) -> Tensor:
        return wide(rows_CD[:, columns]) @ direction_D[columns].double()

    return _summed(work, rows_CD.shape)


def combined(share_C: Tensor, rows_CD: Tensor) -> Tensor:
    """The sum of the rows, each times its share: (D,)."""
    return mixed(share_C[None], rows_CD)[0]


def mixed(share_MC: Tensor, rows_CD: Tensor) -> Tensor:
    """Sums of the rows by several sets of shares: (M, D)."""
    share_MC = share_MC.to(rows_CD.dtype)
    found_MD = rows_CD.new_empty(len(share_MC), rows_CD.shape[1])

    def work(columns: slice) -> None:
        found_MD[:, columns] = share_MC @ rows_CD[:, columns]

    _done(work, rows_CD.shape)
    return found_MD
