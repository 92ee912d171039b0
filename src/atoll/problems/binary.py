"""Yes or no."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_number


def binary() -> Problem:
    """Say how likely the answer is yes, by one logit a sample; targets are 0 and 1."""
    return Problem(
        kind="binary",
        loss=Part("bce"),
        metrics=(Part("accuracy"), Part("auroc"), Part("average_precision"), Part("brier"), Part("calibration_error")),
        scored=by_number,
    )
