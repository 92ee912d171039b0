"""Survival."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_risk


def survival() -> Problem:
    """Say who is at risk: a higher output is an earlier event. Targets are times and events."""
    return Problem(
        kind="survival",
        loss=Part("cox"),
        metrics=(Part("concordance"), Part("kaplan_meier")),
        scored=by_risk,
    )
