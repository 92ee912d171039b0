"""Optimizer: one step of a client's parameters by a gradient, in place.

It works on lists of tensors: the layers of one model, the stacked layers of many clients, or one flat vector. Only
elementwise operations are allowed, so that all three give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


def remember_nothing(tensors: list[Tensor]) -> list[Tensor]:
    """Return an empty memory, for optimisers that keep nothing between steps."""
    return []


class Optimizer(NamedTuple):
    """Two functions: the initial memory, and one step in place."""

    step_: Callable[[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor], None]
    """(tensors, gradients, memory, learning rate, number of the step from 1) -> None; one rate per stacked client."""
    init: Callable[[list[Tensor]], list[Tensor]] = remember_nothing
    """(tensors) -> memory before the first step."""


def spread(scalar: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per client so that it broadcasts over the trailing dimensions of `like`."""
    return scalar.reshape(scalar.shape + (1,) * (like.dim() - scalar.dim()))
