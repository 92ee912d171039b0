"""Rule: what does not go together in a plan, why, what to do instead, and an example of both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan

View = TypeVar("View")
Changes = Mapping[str, object]
"""Dotted settings and their values, as `Plan.replace` takes them."""
Values = Mapping[str, object]

NETWORK = "network"
"""Stands among the parts of a rule that holds between organisations only."""
FIELD = re.compile(r"\{([^|{}]+)\|([^{}]*)\}")
EXAMPLE_PLAN = Plan(
    partition={"num_clients": 6}, policy={"size": 4}, local={"steps": 1, "batch_size": 8}, rounds=1, engine="inline"
)
"""What the examples of rules change."""


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[View]):
    """What a plan must not ask for.

    `reason` and `way_out` are one text each for all plans and for the one that is refused: of {aggregator|a rule that
    compares} a list of rules says what is behind the bar, and a refusal the plan's aggregator, or the finding's value.
    """

    name: str
    parts: tuple[str, ...]
    """The keys of the plan that it compares; it applies to plans that set them all."""
    reason: str
    way_out: str
    finding: Callable[[View], bool | Values | str | None]
    """A view -> whether the plan breaks the rule, with values for the texts, or in the words of the part that objects;
    a pure function."""
    refused: Sequence[Changes]
    """Examples: changes to EXAMPLE_PLAN that the rule refuses."""
    mended: Changes
    """The way out: changes to any of the refused plans with which it runs."""

    def refusal(self, view: View) -> str | None:
        """Return why a plan is refused and what to do; None if this rule has nothing against it."""
        plan: Plan | None = getattr(view, "plan", None)
        finding = self.finding(view) if plan is None or self.applies_to(plan) else None
        if isinstance(finding, str) or not finding:
            return finding if isinstance(finding, str) else None
        values: Values = {} if finding is True else finding
        return FIELD.sub(lambda field: str(values.get(field[1], _shown(plan, field[1]))), self.text)

    @property
    def text(self) -> str:
        """The text of a refusal, with its fields."""
        return f"{self.reason}: {self.way_out}"

    def applies_to(self, plan: Plan) -> bool:
        """Return whether a plan sets all the parts that this rule compares."""
        return all(part == NETWORK or _value(plan, part) not in (None, (), 0) for part in self.parts)


def general(text: str) -> str:
    """Return a text of a rule as it holds for all plans.

    >>> general("{aggregator|a rule that compares} must see each update")
    'a rule that compares must see each update'
    """
    return FIELD.sub(lambda field: field[2], text)


def first(uses: Mapping[str, object]) -> Values | None:
    """Return the first of some uses that a plan makes, as the value of the field `use`.

    >>> first({"detection compares": None, "contribution compares": True})
    {'use': 'contribution compares'}
    """
    return next(({"use": use} for use, made in uses.items() if made), None)


def said(call: Callable[[], object]) -> str | None:
    """Return what a part itself says against its use; None if it says nothing."""
    try:
        call()
    except PlanError as error:
        return str(error)
    return None


def _value(plan: object, key: str) -> object:
    """Return what a plan says at a dotted key; None if it has no such key."""
    for name in key.split("."):
        plan = getattr(plan, name, None)
    return plan


def _shown(plan: object, key: str) -> object:
    value = _value(plan, key)
    return value.name if isinstance(value, Part) else value
