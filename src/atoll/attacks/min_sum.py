"""As far in sum as the honest updates are from each other. Shapes: H honest clients, D parameters."""

from __future__ import annotations

from torch import Tensor

from atoll.attacks.directions import Direction, farthest
from atoll.core.attack import Attack


def min_sum(direction: Direction = "std") -> Attack:
    """Go from the honest mean so far that the squared distances add up to no more than those of any honest update.

        send  mean + gamma p,   sum_i |mean + gamma p - x_i|^2  <=  max_i sum_j |x_i - x_j|^2

    (Shejwalkar and Houmansadr 2021, NDSS, the AGR-agnostic min-sum attack; p is `unit`, `std` or `sign`.) Their search
    by halving is replaced by the largest gamma itself: with a_i = x_i - mean the sum is of |a_i|^2 + gamma^2 |p|^2.
    """

    def reach(away_HD: Tensor, step_D: Tensor) -> Tensor:
        square_H, num = away_HD.square().sum(1), len(away_HD)
        bound = num * square_H.max() + square_H.sum()  # the sum of one honest update, since the a_i add up to 0
        return ((bound - square_H.sum()).clamp(min=0) / (num * step_D.square().sum())).sqrt()

    return farthest(direction, reach)
