"""Decay in steps."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import PlanError


def step(every: int = 100, factor: float = 0.5) -> Callable[[int], float]:
    """Multiply the learning rate by factor^floor(t / every) in round t."""
    if every < 1 or not 0 < factor <= 1:
        raise PlanError(f"step: every must be at least 1 and factor in (0, 1], got {every} and {factor}")
    return lambda version: factor ** (version // every)
