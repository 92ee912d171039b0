"""Exponential decay."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import PlanError


def exponential(decay: float = 0.99) -> Callable[[int], float]:
    """Multiply the learning rate by decay^t in round t."""
    if not 0 < decay <= 1:
        raise PlanError(f"exponential: decay must be in (0, 1], got {decay}")
    return lambda version: decay**version
