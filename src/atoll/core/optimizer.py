"""Optimizer: how a local gradient moves a client's parameters, in place.

It works on lists of tensors: the layers of one model, the layers of many clients stacked, or one flat vector. Only
elementwise operations are allowed, so that all three give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


def remember_nothing(tensors: list[Tensor]) -> list[Tensor]:
    """Keep no state between steps."""
    return []


class Optimizer(NamedTuple):
    """Two functions: the first memory, and one step in place."""

    step_: Callable[[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor], None]
    """(tensors, gradients, memory, learning rate, number of this step from 1); rates have the clients' dimension."""
    init: Callable[[list[Tensor]], list[Tensor]] = remember_nothing


def spread(scalar: Tensor, like: Tensor) -> Tensor:
    """Give a number per client the trailing dimensions of a tensor per client."""
    return scalar.reshape(scalar.shape + (1,) * (like.dim() - scalar.dim()))
