"""The min-sum attack. Shapes: H honest clients, D parameters."""

from __future__ import annotations

from torch import Tensor

from atoll.attacks.directions import Direction, along_direction
from atoll.core.attack import Attack


def min_sum(direction: Direction = "std") -> Attack:
    """Move from the honest mean until the sum of squared distances equals the largest sum of an honest update.

        send  mean + gamma p,   sum_i |mean + gamma p - x_i|^2  <=  max_i sum_j |x_i - x_j|^2

    (Shejwalkar and Houmansadr 2021, NDSS, the AGR-agnostic min-sum attack; p is `unit`, `std` or `sign`.) Instead of
    their search by halving, the largest gamma is computed: with a_i = x_i - mean, the sum is over |a_i|^2 + gamma^2
    |p|^2.
    """

    def max_gamma(centred_HD: Tensor, step_D: Tensor) -> Tensor:
        square_H, num = centred_HD.square().sum(1), len(centred_HD)
        bound = num * square_H.max() + square_H.sum()  # the largest sum of an honest update, since the a_i sum to 0
        return ((bound - square_H.sum()).clamp(min=0) / (num * step_D.square().sum())).sqrt()

    return along_direction(direction, max_gamma)
