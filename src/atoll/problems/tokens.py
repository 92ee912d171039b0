"""Tokens."""

from __future__ import annotations

from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.problems.forms import by_class


def tokens() -> Problem:
    """Say which token comes next at each position; label -100 is padding."""
    return Problem(
        kind="tokens",
        loss=Part("cross_entropy", ignore=True),
        metrics=(Part("confusion"), Part("perplexity")),
        scored=by_class,
    )
