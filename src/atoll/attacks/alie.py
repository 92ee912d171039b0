"""A little is enough. Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

from torch import Tensor

from atoll.attacks.crafting import ALL_AND_RULE, ALL_UPDATES, along_line, replaced, strongest
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update

EXAMPLES = [{}, {"factor": "optimised"}]


def alie(factor: float | Literal["optimised"] | None = None) -> Attack:
    """Stay within the spread of the honest updates, but all on one side: mean - z std, in every coordinate.

    (Baruch et al. 2019, arXiv:1902.06156, algorithm 3.) For m bad of n clients z is the largest with which enough
    honest ones lie farther out, Phi(z) = (n - m - s) / (n - m) with s = floor(n / 2 + 1) - m, unless `factor` gives it
    or is "optimised": then the factor is sought that moves the aggregate most. The standard deviation divides by H. The
    paper's attackers know their own updates only and guess the others' from these.
    """

    def line(honest_HD: Tensor) -> tuple[Tensor, Tensor]:
        mean_D = honest_HD.mean(0)
        return mean_D, -(honest_HD - mean_D).square_().mean(0).sqrt_()  # Tensor.std takes ten times as long by columns

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        if factor == "optimised":
            z = strongest(updates, bad_C, known, line)
        else:
            z = float(factor) if factor is not None else unnoticed(len(bad_C), int(bad_C.sum()))
        return replaced(updates, bad_C, along_line(line, z))

    return Attack(collude=collude, knows=ALL_AND_RULE if factor == "optimised" else ALL_UPDATES)


def unnoticed(num: int, num_bad: int) -> float:
    """The z of the paper for so many clients; 0 where they are too few, or already the majority.

    >>> round(unnoticed(50, 24), 2)
    1.43
    """
    supporters = num // 2 + 1 - num_bad
    below = (num - num_bad - supporters) / (num - num_bad) if num > num_bad else 0.0
    return max(0.0, NormalDist().inv_cdf(below)) if 0 < below < 1 else 0.0
