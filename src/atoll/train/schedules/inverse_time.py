"""Decay with the inverse of time."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import PlanError


def inverse_time(decay: float = 0.1) -> Callable[[int], float]:
    """Multiply the learning rate by 1 / (1 + decay * t) in round t (Li et al. 2020, arXiv:1907.02189, theorem 1)."""
    if decay < 0:
        raise PlanError(f"inverse_time: decay must be 0 or more, got {decay}")
    return lambda version: 1 / (1 + decay * version)
