"""What rules share that look at updates as points. Shapes: C clients, D parameters.

A rule that only needs distances and angles does not touch the D parameters twice: it works on the inner products.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.aggregators.columns import products
from atoll.core.options import Range

BadClients = Annotated[int, Range(low=0, hint="f is the largest number of bad clients")]


def at_least(name: str, f: int, formula: str, num: int) -> str:
    """Say how many updates a rule needs, as the beginning of a message.

    >>> at_least("krum", 3, "2f + 3", 9)
    'krum with f = 3 needs at least 2f + 3 = 9 updates'
    """
    return f"{name} with f = {f} needs at least {formula} = {num} updates"


def squared_distances(rows_CD: Tensor) -> Tensor:
    """Between all pairs of rows, (C, C) in float64: |x|^2 + |y|^2 - 2 x.y."""
    product_CC = products(rows_CD)
    square_C = product_CC.diagonal()
    found_CC = (square_C[:, None] + square_C[None] - (product_CC + product_CC.T)).clamp_(min=0)  # the same both ways
    return found_CC.fill_diagonal_(0)


def coordinates(rows_CD: Tensor) -> Tensor:
    """Points (C, C) in float64 with the same lengths and angles as the rows.

    With G the inner products and s the lengths, G / (s s') = V diag(l) V' gives the points s V sqrt(l). The division
    keeps a row that is 10^30 times as long as the others from hiding them.
    """
    product_CC = products(rows_CD)
    length_C = product_CC.diagonal().sqrt()
    safe_C = torch.where(length_C > 0, length_C, 1.0)
    value_C, vector_CC = torch.linalg.eigh(product_CC / safe_C[:, None] / safe_C[None])
    point_CC: Tensor = length_C[:, None] * vector_CC * value_C.clamp(min=0).sqrt()
    return point_CC


def by_krum_score(square_CC: Tensor, f: int) -> Tensor:
    """Points from best to worst: by the sum of squared distances to the n - f - 2 nearest others, at least to one.

    Two that are each other's only neighbour have the same score; then the sum to all others decides.
    """
    nearest = max(1, len(square_CC) - f - 2)
    sorted_CC = square_CC.sort(dim=1).values
    order_C = sorted_CC.sum(1).argsort(stable=True)
    return order_C[sorted_CC[order_C, 1 : 1 + nearest].sum(1).argsort(stable=True)]
