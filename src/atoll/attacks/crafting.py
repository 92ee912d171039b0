"""Helpers for attacks that see the honest updates.

Shapes: C clients, H honest ones, A bad ones, D parameters, K coordinates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.attack import Knowledge
from atoll.core.messages import Update

ALL_UPDATES = "every honest update of the cohort"
ALL_AND_RULE = "every honest update of the cohort, and the server's rule"
GRID: list[float] = [10 ** (power / 4) for power in range(-8, 9)]
"""Factors of the first, coarse search, from 0.01 to 100."""

Craft = Callable[[Tensor], Tensor]
"""(honest_HD) -> one vector (D,) for all bad clients, or one for each (A, D)."""
Line = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(honest_HD) -> (start (D,), step (D,)): bad clients send start + factor * step."""


def replace_bad_rows(updates: Update, bad_C: Tensor, craft: Craft) -> Update:
    """Replace the bad rows by what `craft` returns for the honest rows, for the update and each extra vector.

    Rows of whole numbers, as secure sums add them, are crafted as floats and rounded.
    """
    if bool(bad_C.all()) or not bool(bad_C.any()):
        return updates  # no honest rows to look at, or no bad ones to replace

    def replaced(rows: Tensor) -> Tensor:
        flat_CD = rows.reshape(len(rows), -1).clone()
        honest_HD = flat_CD[~bad_C]
        if honest_HD.is_floating_point():
            flat_CD[bad_C] = craft(honest_HD)
        else:
            flat_CD[bad_C] = craft(honest_HD.double()).round_().to(honest_HD.dtype)
        return flat_CD.view(rows.shape)

    delta_CD = replaced(updates.delta_D)  # before the extras: `craft` may draw random numbers
    return updates._replace(delta_D=delta_CD, aux={name: replaced(rows) for name, rows in updates.aux.items()})


def point_on_line(line: Line, factor: float) -> Craft:
    """Return a function: honest updates -> start + factor * step."""

    def vector(honest_HD: Tensor) -> Tensor:
        start_D, step_D = line(honest_HD)
        return start_D + factor * step_D

    return vector


def strongest_factor(updates: Update, bad_C: Tensor, known: Knowledge, line: Line) -> float:
    """Return the factor that moves the server's aggregate farthest from the mean of the honest updates.

    The search tries a grid, then four times both sides of the best factor at decreasing distances. (Shejwalkar and
    Houmansadr 2021, NDSS, attack a known rule in this way, with a search by halving.)
    """
    if known.aggregate is None or bool(bad_C.all()) or not bool(bad_C.any()):
        return 1.0
    aggregate, honest_HD = known.aggregate, updates.delta_D[~bad_C].flatten(1)
    if not honest_HD.is_floating_point():
        honest_HD = honest_HD.double()
    honest_HD, start_D, step_D = _in_coordinates(honest_HD, line, reduce=known.rotation_equivariant)
    mean_D = honest_HD.double().mean(0)
    sent_CD = honest_HD.new_empty(len(bad_C), honest_HD.shape[1])
    sent_CD[~bad_C] = honest_HD

    def harm(factor: float) -> float:
        sent_CD[bad_C] = start_D + factor * step_D
        return float((aggregate(Update(sent_CD, updates.weight, {})).double() - mean_D).norm())

    harms: dict[float, float] = {factor: harm(factor) for factor in GRID}
    ratio: float = GRID[1] / GRID[0]
    for _ in range(4):
        best, ratio = max(harms, key=lambda factor: harms[factor]), ratio**0.5
        harms |= {factor: harm(factor) for factor in (best / ratio, best * ratio)}
    return max(harms, key=lambda factor: harms[factor])


def _in_coordinates(honest_HD: Tensor, line: Line, *, reduce: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the honest updates, start and step; with `reduce`, in the coordinates of the space that they span.

    With G = V diag(l) V' the inner products of all these vectors, the rows of V sqrt(l) have the same inner products.
    """
    start_D, step_D = line(honest_HD)
    if not reduce:
        return honest_HD, start_D, step_D
    all_KD = torch.cat([honest_HD, start_D[None], step_D[None]])
    eigenvalue_K, eigenvector_KK = torch.linalg.eigh((all_KD @ all_KD.T).double())
    point_KK = eigenvector_KK * eigenvalue_K.clamp(min=0).sqrt()
    return point_KK[:-2], point_KK[-2], point_KK[-1]
