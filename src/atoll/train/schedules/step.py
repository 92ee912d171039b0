"""Decay in steps."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.options import Count, ShareAboveZero


def step(every: Count = 100, factor: ShareAboveZero = 0.5) -> Callable[[int], float]:
    """Multiply the learning rate by factor^floor(t / every) in round t."""
    return lambda version: factor ** (version // every)
