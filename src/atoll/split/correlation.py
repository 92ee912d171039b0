"""Distance correlation: how much two sets of rows depend on each other, in any way. Shapes: N rows.

With a_ij = |x_i - x_j| and A_ij = a_ij - mean_j - mean_i + mean, and B likewise of y,
dCov^2 = mean(A B), and dCor = sqrt(dCov^2(x, y) / sqrt(dCov^2(x, x) dCov^2(y, y))) (Székely, Rizzo and Bakirov 2007,
Ann. Statist. 35(6), definitions 4 and 5). It is 0 for independent variables alone, and 1 for linear maps that keep
angles. Of few rows it is too large: the bias-corrected statistic, with U-centred matrices, is about 0 for independent
rows, and may be negative (Székely and Rizzo 2014, Ann. Statist. 42(6), eq. 2.1 and 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import DataError

LEAST_ROWS = 4
"""The bias-corrected statistic divides by N - 3."""
TINY = 1e-20


class Dependence(NamedTuple):
    """How much rows of two matrices depend on each other."""

    dcor: float
    """Distance correlation, in [0, 1]."""
    squared: float
    """Bias-corrected square of it, at most 1; about 0 for independent rows, and then as often below 0 as above."""
    num_rows: int


def dependence(x: Tensor, y: Tensor) -> Dependence:
    """Return the distance correlation of paired rows, exactly, in float64; memory is 16 N^2 bytes.

    >>> x = torch.arange(8.0).unsqueeze(1)
    >>> dependence(x, 3 - 2 * x)
    Dependence(dcor=1.0, squared=1.0, num_rows=8)
    """
    num = len(x)
    if num < LEAST_ROWS or len(y) != num:
        raise DataError(
            f"a distance correlation takes pairs of rows, at least {LEAST_ROWS}, got {num} and {len(y)}: give more, as "
            "many of each"
        )
    a, b = (distances(each.detach().double()) for each in (x, y))
    return Dependence(
        float(_ratio(*map(centred, (a, b))).clamp(min=0).sqrt()), float(_ratio(*map(u_centred, (a, b)))), num
    )


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Return the distance correlation of paired rows as a number that can be differentiated by both.

    Where all rows of either are equal it is 0, and so is its gradient.
    """
    a, b = centred(distances(x)), centred(distances(y))
    ratio = _ratio(a, b)
    positive = ratio > TINY
    return torch.where(positive, torch.where(positive, ratio, torch.ones_like(ratio)).sqrt(), torch.zeros_like(ratio))


def distances(rows: Tensor) -> Tensor:
    """Return the distances of all pairs of rows, (N, N), differentiable where they are 0 too."""
    return torch.cdist(rows.flatten(1), rows.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")


def centred(a: Tensor) -> Tensor:
    """Return distances less the means of their row and column, plus the mean of all."""
    return a - a.mean(0, keepdim=True) - a.mean(1, keepdim=True) + a.mean()


def u_centred(a: Tensor) -> Tensor:
    """Return U-centred distances, scaled so that a mean over all pairs is the unbiased one; 0 on the diagonal."""
    num = len(a)
    found = (
        a - a.sum(0, keepdim=True) / (num - 2) - a.sum(1, keepdim=True) / (num - 2) + a.sum() / ((num - 1) * (num - 2))
    )
    return found.fill_diagonal_(0.0)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return dCov^2(x, y) / sqrt(dCov^2(x, x) dCov^2(y, y)) of centred distances; 0 where a variance is."""
    scale = ((a * a).mean() * (b * b).mean()).clamp(min=0)
    alive = scale > TINY
    return torch.where(alive, (a * b).mean() / torch.where(alive, scale, torch.ones_like(scale)).sqrt(), 0 * scale)
