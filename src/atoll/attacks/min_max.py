"""The min-max attack. Shapes: H honest clients, D parameters."""

from __future__ import annotations

from torch import Tensor

from atoll.attacks.directions import Direction, along_direction
from atoll.core.attack import Attack


def min_max(direction: Direction = "std") -> Attack:
    """Move from the honest mean until the largest distance to an honest update equals the largest between two of them.

        send  mean + gamma p,   max_i |mean + gamma p - x_i|  <=  max_ij |x_i - x_j|

    (Shejwalkar and Houmansadr 2021, NDSS, the AGR-agnostic min-max attack; p is `unit`, `std` or `sign`.) Instead of
    their search by halving, the largest gamma is computed: the least of the roots of a quadratic for each x_i.
    """

    def max_gamma(centred_HD: Tensor, step_D: Tensor) -> Tensor:
        product_HH = centred_HD @ centred_HD.T
        square_H = product_HH.diagonal()
        bound = (square_H[:, None] + square_H[None] - 2 * product_HH).max()
        dot_H, step_square = centred_HD @ step_D, step_D.square().sum()
        return ((dot_H + (dot_H.square() + step_square * (bound - square_H)).clamp(min=0).sqrt()) / step_square).min()

    return along_direction(direction, max_gamma)
