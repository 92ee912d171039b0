"""Exponential decay."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.options import ShareAboveZero


def exponential(decay: ShareAboveZero = 0.99) -> Callable[[int], float]:
    """Multiply the learning rate by decay^t in round t."""
    return lambda version: decay**version
