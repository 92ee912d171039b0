"""One learning rate for all rounds."""

from __future__ import annotations

from collections.abc import Callable


def constant() -> Callable[[int], float]:
    """Multiply the learning rate by 1 in every round."""
    return lambda version: 1.0
