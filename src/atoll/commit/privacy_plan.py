"""Forecasts of the privacy loss of a plan, before it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from atoll.commit.guard import NO_PRIVACY, planned, statement_of
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.core.privacy import Draws, Exposure, Mechanism
from atoll.privacy.accounting import ACCOUNTANTS, Accountant, calibrate_sigma, spent, supports

ROWS = 12
"""Number of rows of a forecast, evenly spaced over the plan's rounds."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The noise multiplier for an epsilon, with what is needed to account for it."""

    sigma: float
    mechanism: Mechanism
    exposure: Exposure
    accountants: tuple[Accountant, ...]
    """Accountants that support the mechanism."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Forecast of the epsilon of a plan, by rounds."""

    rounds: tuple[int, ...]
    epsilons: dict[Accountant, list[float]]
    """Accountant -> epsilon after each of `rounds`."""
    last_round: int | None
    """Last round within the budget; None without a budget."""
    statement: dict[str, Any]
    largest: Draws | None
    """The client with the largest epsilon, where samples are protected and clients differ."""


def calibrated_plan(plan: Plan, epsilon: float) -> Calibrated:
    """Return the least sigma with which all rounds of a plan spend at most epsilon."""
    if not epsilon > 0:
        raise PlanError(f"--epsilon must be above 0, got {epsilon}; 1 to 10 is usual")
    if plan.rounds < 1:
        raise PlanError("a plan without rounds has no privacy loss to calibrate for: set rounds to 1 or more")
    if plan.privacy is None:
        raise PlanError(NO_PRIVACY)

    def with_noise(sigma: float) -> Plan:
        return plan.replace({"privacy.sigma": sigma})

    _, exposure = planned(with_noise(1.0))

    def mechanism_of(sigma: float) -> Mechanism:
        part = with_noise(sigma).privacy
        assert part is not None
        mechanism: Mechanism = part.build("privacy.mechanisms", exposure=exposure)
        return mechanism

    sigma = calibrate_sigma(mechanism_of, exposure, epsilon)
    mechanism = mechanism_of(sigma)
    kinds = tuple(kind for kind in ACCOUNTANTS if supports(mechanism, exposure, kind))
    return Calibrated(sigma=sigma, mechanism=mechanism, exposure=exposure, accountants=kinds)


def outlook(plan: Plan) -> Outlook:
    """Forecast the epsilon of a plan from its first to its last round, and the round in which its budget ends."""
    mechanism, exposure = planned(plan)
    total = max(1, plan.rounds)
    rounds = tuple(sorted({max(1, math.ceil(total * part / ROWS)) for part in range(1, ROWS + 1)} | {1}))
    kinds = [kind for kind in ACCOUNTANTS if supports(mechanism, exposure, kind)]
    epsilons = {
        kind: [spent(mechanism, exposure._replace(attempts=number), kind).epsilon for number in rounds]
        for kind in kinds
    }
    return Outlook(
        rounds=rounds,
        epsilons=epsilons,
        last_round=None if mechanism.epsilon is None else last_round(mechanism, exposure, total),
        statement=statement_of(mechanism),
        largest=spent(mechanism, exposure).largest if len(exposure.groups) > 1 else None,
    )


def last_round(mechanism: Mechanism, exposure: Exposure, total: int) -> int:
    """Return the last of `total` rounds within the budget; 0 if even the first exceeds it."""
    if mechanism.epsilon is None:
        return total
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        within = spent(mechanism, exposure._replace(attempts=middle)).epsilon <= mechanism.epsilon
        low, high = (middle, high) if within else (low, middle - 1)
    return low
