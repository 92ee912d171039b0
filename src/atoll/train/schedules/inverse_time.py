"""Decay with the inverse of time."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.options import NotNegative


def inverse_time(decay: NotNegative = 0.1) -> Callable[[int], float]:
    """Multiply the learning rate by 1 / (1 + decay * t) in round t (Li et al. 2020, arXiv:1907.02189, theorem 1)."""
    return lambda version: 1 / (1 + decay * version)
