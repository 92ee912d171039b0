"""What a private plan will cost, before it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from atoll.commit.guard import NO_PRIVACY, planned, statement_of
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.core.privacy import Draws, Exposure, Mechanism
from atoll.privacy.accounting import ACCOUNTANTS, Accountant, calibrated, knows, spent

ROWS = 12
"""So many numbers of rounds are shown."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The noise for an epsilon, and what it then costs."""

    sigma: float
    mechanism: Mechanism
    exposure: Exposure
    accountants: tuple[Accountant, ...]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a plan spends by rounds."""

    rounds: tuple[int, ...]
    epsilons: dict[Accountant, list[float]]
    """Accountant -> epsilon after each of `rounds`."""
    last_round: int | None
    """The last round that the budget pays for, where there is one."""
    statement: dict[str, Any]
    largest: Draws | None
    """The client whose samples spend that, where clients differ."""


def calibrated_plan(plan: Plan, epsilon: float) -> Calibrated:
    """The least sigma with which all rounds of a plan spend at most epsilon."""
    if not epsilon > 0:
        raise PlanError(f"--epsilon must be above 0, got {epsilon}")
    if plan.rounds < 1:
        raise PlanError("a plan of no rounds spends nothing: set rounds")
    if plan.privacy is None:
        raise PlanError(NO_PRIVACY)

    def with_noise(sigma: float) -> Plan:
        return plan.replace({"privacy.sigma": sigma})

    _, exposure = planned(with_noise(1.0))

    def mechanism_of(sigma: float) -> Mechanism:
        part = with_noise(sigma).privacy
        assert part is not None
        found: Mechanism = part.build("privacy.mechanisms", exposure=exposure)
        return found

    sigma = calibrated(mechanism_of, exposure, epsilon)
    mechanism = mechanism_of(sigma)
    kinds = tuple(kind for kind in ACCOUNTANTS if knows(mechanism, exposure, kind))
    return Calibrated(sigma=sigma, mechanism=mechanism, exposure=exposure, accountants=kinds)


def outlook(plan: Plan) -> Outlook:
    """What a plan spends after one round, after some, and after all; and where its budget ends it."""
    mechanism, exposure = planned(plan)
    total = max(1, plan.rounds)
    rounds = tuple(sorted({max(1, math.ceil(total * part / ROWS)) for part in range(1, ROWS + 1)} | {1}))
    kinds = [kind for kind in ACCOUNTANTS if knows(mechanism, exposure, kind)]
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
    """The last round that the budget pays for; it may be none, or the last of all."""
    if mechanism.epsilon is None:
        return total
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        pays = spent(mechanism, exposure._replace(attempts=middle)).epsilon <= mechanism.epsilon
        low, high = (middle, high) if pays else (low, middle - 1)
    return low
