"""Classification."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_class


def classification() -> Problem:
    """Say which of several classes a sample has, or each position of a sequence."""
    return Problem(
        kind="classification",
        loss=Part("cross_entropy"),
        metrics=(Part("confusion"),),
        scored=by_class,
    )
