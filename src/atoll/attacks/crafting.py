"""What attacks share that see the honest updates.

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
"""Factors that are tried first, from 0.01 to 100."""

Craft = Callable[[Tensor], Tensor]
"""(honest_HD) -> one vector (D,) for all bad clients, or one for each (A, D)."""
Line = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(honest_HD) -> where bad clients begin (D,), and the step (D,) that they take from there, times a factor."""


def replaced(updates: Update, bad_C: Tensor, craft: Craft) -> Update:
    """Put what `craft` makes of the honest rows into the bad rows, for the update and each extra vector by itself."""
    if bool(bad_C.all()) or not bool(bad_C.any()):
        return updates  # nobody to look at, or nobody to lie

    def one(rows: Tensor) -> Tensor:
        flat_CD = rows.reshape(len(rows), -1).clone()
        flat_CD[bad_C] = craft(flat_CD[~bad_C])
        return flat_CD.view(rows.shape)

    return updates._replace(delta_D=one(updates.delta_D), aux={name: one(rows) for name, rows in updates.aux.items()})


def along_line(line: Line, factor: float) -> Craft:
    """What bad clients send who go so many steps."""

    def vector(honest_HD: Tensor) -> Tensor:
        from_D, step_D = line(honest_HD)
        return from_D + factor * step_D

    return vector


def strongest(updates: Update, bad_C: Tensor, known: Knowledge, line: Line) -> float:
    """The factor that moves the server's aggregate farthest from the mean of the honest updates.

    Factors are tried on a grid, then four times on both sides of the best, ever closer. (Shejwalkar and Houmansadr
    2021, NDSS, attack a known rule like this, with a search by halving.)
    """
    if known.aggregate is None or bool(bad_C.all()) or not bool(bad_C.any()):
        return 1.0
    aggregate, honest_HD = known.aggregate, updates.delta_D[~bad_C].flatten(1)
    honest_HD, from_D, step_D = _seen(honest_HD, line, turned=known.rotation_equivariant)
    mean_D = honest_HD.double().mean(0)
    sent_CD = honest_HD.new_empty(len(bad_C), honest_HD.shape[1])
    sent_CD[~bad_C] = honest_HD

    def harm(factor: float) -> float:
        sent_CD[bad_C] = from_D + factor * step_D
        return float((aggregate(Update(sent_CD, updates.weight, {})).double() - mean_D).norm())

    tried: dict[float, float] = {factor: harm(factor) for factor in GRID}
    step: float = GRID[1] / GRID[0]
    for _ in range(4):
        best, step = max(tried, key=lambda factor: tried[factor]), step**0.5
        tried |= {factor: harm(factor) for factor in (best / step, best * step)}
    return max(tried, key=lambda factor: tried[factor])


def _seen(honest_HD: Tensor, line: Line, *, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The honest updates and the line; where the rule allows it, in the few coordinates that they span.

    With G = V diag(l) V' the inner products of all these vectors, the rows of V sqrt(l) have the same.
    """
    from_D, step_D = line(honest_HD)
    if not turned:
        return honest_HD, from_D, step_D
    all_KD = torch.cat([honest_HD, from_D[None], step_D[None]])
    value_K, vector_KK = torch.linalg.eigh((all_KD @ all_KD.T).double())
    point_KK = vector_KK * value_K.clamp(min=0).sqrt()
    return point_KK[:-2], point_KK[-2], point_KK[-1]
