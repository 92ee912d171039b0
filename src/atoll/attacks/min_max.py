"""As far as the honest updates are from each other. Shapes: H honest clients, D parameters."""

from __future__ import annotations

from torch import Tensor

from atoll.attacks.directions import Direction, farthest
from atoll.core.attack import Attack


def min_max(direction: Direction = "std") -> Attack:
    """Go from the honest mean so far that no honest update is farther away than two of them are from each other.

        send  mean + gamma p,   max_i |mean + gamma p - x_i|  <=  max_ij |x_i - x_j|

    (Shejwalkar and Houmansadr 2021, NDSS, the AGR-agnostic min-max attack; p is `unit`, `std` or `sign`.) Their search
    by halving is replaced by the largest gamma itself, the least of the roots of one square equation for each x_i.
    """

    def reach(away_HD: Tensor, step_D: Tensor) -> Tensor:
        product_HH = away_HD @ away_HD.T
        square_H = product_HH.diagonal()
        bound = (square_H[:, None] + square_H[None] - 2 * product_HH).max()
        along_H, size = away_HD @ step_D, step_D.square().sum()
        return ((along_H + (along_H.square() + size * (bound - square_H)).clamp(min=0).sqrt()) / size).min()

    return farthest(direction, reach)
