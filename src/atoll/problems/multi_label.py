"""Several labels."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_number


def multi_label() -> Problem:
    """Say which of several labels a sample has, by a logit each; targets are 0 and 1."""
    return Problem(
        kind="multi_label",
        loss=Part("bce"),
        metrics=(Part("f1"), Part("accuracy"), Part("auroc")),
        scored=by_number,
    )
