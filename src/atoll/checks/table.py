"""The table of rules, in the order in which they are applied, and the function that applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.checks import (
    adapters,
    devices,
    engines,
    network,
    personal,
    privacy,
    problems,
    public,
    robust,
    rounds,
    secret,
    split,
    vertical,
)
from atoll.checks.rule import Rule
from atoll.checks.views import Budget, Networked, NewClients, Parts, Round, Served, ServerSamples, Simulated
from atoll.core.errors import PlanError

TABLE: Mapping[type, tuple[Rule[Any], ...]] = {
    Networked: network.RULES,
    NewClients: personal.NEW_CLIENTS,
    ServerSamples: robust.SAMPLES,
    Simulated: (*rounds.SIMULATED, *secret.SIMULATED, *engines.SIMULATED),
    Parts: (
        *split.RULES,
        *vertical.RULES,
        *problems.RULES,
        *rounds.RULES,
        *personal.RULES,
        *public.RULES,
        *robust.RULES,
        *adapters.RULES,
        *secret.RULES,
        *privacy.RULES,
        *devices.RULES,
    ),
    Budget: privacy.BUDGET,
    Round: (*privacy.REHEARSED, *rounds.REHEARSED),
    Served: network.SERVED,
}
"""View -> the rules that look at it."""


def check(view: Networked | NewClients | Served | ServerSamples | Simulated | Parts | Budget | Round) -> None:
    """Apply every rule that looks at such a view; the first one that is broken raises a PlanError with its name."""
    for rule in TABLE[type(view)]:
        text = rule.refusal(view)
        if text is not None:
            error = PlanError(text)
            error.rule = rule.name
            raise error


def rules(*, network: bool | None = None) -> Iterator[Rule[Any]]:
    """List all rules, or those that hold for plans of a simulation or of a network, in the order of the table."""
    left_out = {True: (Simulated,), False: (Networked, Served), None: ()}[network]
    return (rule for view, some in TABLE.items() if view not in left_out for rule in some)
