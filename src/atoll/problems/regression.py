"""Regression."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_number


def regression() -> Problem:
    """Say a number, or several."""
    return Problem(
        kind="regression",
        loss=Part("mse"),
        metrics=(Part("rmse"), Part("mae"), Part("r2"), Part("predicted")),
        scored=by_number,
    )
