"""Distances and coordinates of updates as points. Shapes: C clients, D parameters.

A rule that needs only distances and angles works on the (C, C) inner products, and reads the D parameters once.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.aggregators.columns import gram_matrix
from atoll.core.options import Range

BadClients = Annotated[int, Range(low=0, hint="f is the largest number of bad clients")]


def needs_updates(name: str, f: int, formula: str, num: int) -> str:
    """Return the first part of an error message: how many updates a rule needs.

    >>> needs_updates("krum", 3, "2f + 3", 9)
    'krum with f = 3 needs at least 2f + 3 = 9 updates'
    """
    return f"{name} with f = {f} needs at least {formula} = {num} updates"


def squared_distances(rows_CD: Tensor) -> Tensor:
    """Return the squared distances between all pairs of rows, (C, C) in float64: |x|^2 + |y|^2 - 2 x.y."""
    product_CC = gram_matrix(rows_CD)
    square_C = product_CC.diagonal()
    # The sum with the transpose makes the result symmetric to the last bit.
    distance_CC = (square_C[:, None] + square_C[None] - (product_CC + product_CC.T)).clamp_(min=0)
    return distance_CC.fill_diagonal_(0)


def coordinates(rows_CD: Tensor) -> Tensor:
    """Return points (C, C) in float64 with the same norms and angles as the rows.

    With G the inner products and s the norms, G / (s s') = V diag(l) V' gives the points s V sqrt(l). The division
    preserves the digits of short rows beside a row that is 10^30 times as long.
    """
    product_CC = gram_matrix(rows_CD)
    norm_C = product_CC.diagonal().sqrt()
    divisor_C = torch.where(norm_C > 0, norm_C, 1.0)
    eigenvalue_C, eigenvector_CC = torch.linalg.eigh(product_CC / divisor_C[:, None] / divisor_C[None])
    point_CC: Tensor = norm_C[:, None] * eigenvector_CC * eigenvalue_C.clamp(min=0).sqrt()
    return point_CC


def rank_by_krum(square_CC: Tensor, f: int) -> Tensor:
    """Rank points by the sum of squared distances to their max(1, n - f - 2) nearest neighbours, lowest first.

    Two points that are each other's only neighbour have the same score; the sum over all others breaks the tie.
    """
    num_neighbours = max(1, len(square_CC) - f - 2)
    sorted_CC = square_CC.sort(dim=1).values
    by_total_C = sorted_CC.sum(1).argsort(stable=True)
    return by_total_C[sorted_CC[by_total_C, 1 : 1 + num_neighbours].sum(1).argsort(stable=True)]
