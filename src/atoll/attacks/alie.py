"""A little is enough (ALIE). Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

from torch import Tensor

from atoll.attacks.crafting import ALL_AND_RULE, ALL_UPDATES, point_on_line, replace_bad_rows, strongest_factor
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update

EXAMPLES = [{}, {"factor": "optimised"}]


def alie(factor: float | Literal["optimised"] | None = None) -> Attack:
    """Send mean - z std of the honest updates in every coordinate, which stays within their spread.

    (Baruch et al. 2019, arXiv:1902.06156, algorithm 3.) By default, for m bad of n clients, z is the largest for which
    s = floor(n / 2 + 1) - m honest clients lie farther out: Phi(z) = (n - m - s) / (n - m). `factor` sets z;
    "optimised" searches the z that moves the aggregate most. The standard deviation divides by H. In the paper,
    attackers know only their own updates and estimate the others from these.
    """

    def line(honest_HD: Tensor) -> tuple[Tensor, Tensor]:
        mean_D = honest_HD.mean(0)
        return mean_D, -(honest_HD - mean_D).square_().mean(0).sqrt_()  # ten times as fast as Tensor.std by columns

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        if factor == "optimised":
            z = strongest_factor(updates, bad_C, known, line)
        else:
            z = float(factor) if factor is not None else default_z(len(bad_C), int(bad_C.sum()))
        return replace_bad_rows(updates, bad_C, point_on_line(line, z))

    return Attack(collude=collude, knows=ALL_AND_RULE if factor == "optimised" else ALL_UPDATES)


def default_z(num: int, num_bad: int) -> float:
    """Return the z of the paper; 0 if there are too few clients, or if bad ones are the majority.

    >>> round(default_z(50, 24), 2)
    1.43
    """
    supporters = num // 2 + 1 - num_bad
    below = (num - num_bad - supporters) / (num - num_bad) if num > num_bad else 0.0
    return max(0.0, NormalDist().inv_cdf(below)) if 0 < below < 1 else 0.0
