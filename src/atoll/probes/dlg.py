"""Deep leakage from gradients. Shapes: N samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.core.options import Count
from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work
from atoll.probes.matching import Search, no_search, search, squared_distance

CHUNK = 20
"""Iterations between two looks at the clock."""
PATIENCE = 10
"""Chunks in which the distance must fall by a tenth."""
SCALE = 1e8
"""Distances are minimised times this: torch's L-BFGS leaves out what it learns of curvature below 1e-10."""
NEAR = 1e-5
"""The distance below which no other beginning is tried."""
ENOUGH = 1e-9
"""The distance below which nothing is gained: updates are rounded."""


def dlg(restarts: Count = 5, iterations: Count = 2000) -> Probe:
    """Minimise the distance of gradients over images by L-BFGS (Zhu et al. 2019, arXiv:1906.08935, algorithm 1).

    x* = argmin_x |grad L(x, y) - seen|^2, from up to `restarts` random beginnings of which the one nearest in gradient
    is taken. Labels are read off the last layer first (`label_counts`), which makes the search smoother (Zhao et al.
    2020, arXiv:2001.02610), and images are searched for by scaled frequencies (`natural`). Updates of several steps are
    taken as one step on all samples.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        how = Search(
            distance=squared_distance,
            descend=lambda objective, x, is_over: lbfgs(objective, x, is_over, iterations),
            restarts=restarts,
            near=NEAR,
            dtype=torch.float64,
        )
        return search(known, sights, work, how)

    return Probe(goal=SAMPLES, run=run, why_not=no_search)


def lbfgs(
    objective: Callable[[Tensor], Tensor],
    x: Tensor,
    is_over: Callable[[], bool],
    iterations: int,
    enough: float = ENOUGH,
) -> Tensor:
    """Return the samples at which L-BFGS with strong Wolfe steps arrives; it stops early where it is stuck."""
    x = x.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x], max_iter=CHUNK, history_size=100, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        value = objective(x) * SCALE
        (x.grad,) = torch.autograd.grad(value, x)
        return float(value.detach())

    values = list[float]()
    for _ in range(math.ceil(iterations / CHUNK)):
        values.append(float(optimizer.step(closure)))  # type: ignore[no-untyped-call]
        stuck = len(values) > PATIENCE and values[-1] > 0.9 * values[-1 - PATIENCE]
        if not math.isfinite(values[-1]) or values[-1] <= enough * SCALE or stuck or is_over():
            break
    return x.detach()
