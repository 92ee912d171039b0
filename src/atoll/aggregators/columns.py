"""Sums, products and sorts over a (clients x parameters) matrix, in blocks of columns that fit into the cache.

Shapes: C clients, M rows that come out, D parameters, B columns of a block. Blocks are shared out to as many threads as
there are cores. Their width is fixed and their results are put together in order, so that the bits are the same
whatever the number of threads. Values may be as large as float32 allows: sums of squares are taken in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

WIDTH = 2048
"""Columns of a block."""


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


def over_blocks(work: Callable[[slice], T], num_columns: int, threads: int | None = None) -> list[T]:
    """Do the work of every block of columns; what it gives comes back in the order of the blocks."""
    slices = [slice(start, start + WIDTH) for start in range(0, num_columns, WIDTH)]
    threads = min(threads or num_cores(), len(slices))
    with _one_thread():
        if threads <= 1:
            return [work(columns) for columns in slices]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, slices))


def by_sorted_columns(rows_CD: Tensor, rule: Callable[[Array], Array]) -> Tensor:
    """Make one value of each column: `rule` gets columns as the rows of an array (B, C), each sorted upwards."""
    values = rows_CD.detach().numpy()
    found_D = np.empty(values.shape[1], dtype=values.dtype)

    def work(columns: slice) -> None:
        block_BC = np.array(values[:, columns].T, order="C")
        block_BC.sort(axis=1)
        found_D[columns] = rule(block_BC)

    over_blocks(work, values.shape[1])
    return torch.from_numpy(found_D)


def products(rows_CD: Tensor) -> Tensor:
    """The inner products of all pairs of rows, (C, C) in float64."""

    def work(columns: slice) -> Tensor:
        block_CB = rows_CD[:, columns].double()
        return block_CB @ block_CB.T

    return torch.stack(over_blocks(work, rows_CD.shape[1])).sum(0)


def lengths(rows_CD: Tensor, centre_D: Tensor | None = None) -> Tensor:
    """The L2 norm of every row, or its distance to a centre, (C,) in float64."""

    def work(columns: slice) -> Tensor:
        block_CB = rows_CD[:, columns].double()
        block_CB = block_CB if centre_D is None else block_CB.sub_(centre_D[columns])
        return block_CB.square_().sum(1)

    return torch.stack(over_blocks(work, rows_CD.shape[1])).sum(0).sqrt()


def along(rows_CD: Tensor, direction_D: Tensor) -> Tensor:
    """The inner product of every row with one vector, (C,) in float64."""

    def work(columns: slice) -> Tensor:
        return rows_CD[:, columns].double() @ direction_D[columns].double()

    return torch.stack(over_blocks(work, rows_CD.shape[1])).sum(0)


def combined(share_C: Tensor, rows_CD: Tensor) -> Tensor:
    """The sum of the rows, each times its share: (D,)."""
    return mixed(share_C[None], rows_CD)[0]


def mixed(share_MC: Tensor, rows_CD: Tensor) -> Tensor:
    """Sums of the rows by several sets of shares: (M, D)."""
    share_MC = share_MC.to(rows_CD.dtype)
    found_MD = rows_CD.new_empty(len(share_MC), rows_CD.shape[1])

    def work(columns: slice) -> None:
        found_MD[:, columns] = share_MC @ rows_CD[:, columns]

    over_blocks(work, rows_CD.shape[1])
    return found_MD
