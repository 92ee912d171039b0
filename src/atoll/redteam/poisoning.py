"""How a plan's own rule stands up to clients that attack."""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.api import run
from atoll.core.errors import AtollError
from atoll.core.plan import Plan
from atoll.redteam.defences import quiet
from atoll.report.main_figure import main_of
from atoll.report.redteam import FAILED, NO_TIME, Poisoned

ATTACKS: tuple[tuple[str, dict[str, object]], ...] = (
    ("sign_flip", {"name": "sign_flip"}),
    ("alie", {"name": "alie"}),
    ("label_flip", {"name": "label_flip"}),
    ("backdoor", {"name": "backdoor"}),
)
"""Attacks that are tried: loud, hidden among honest updates, by false labels, and with a trigger."""
SHARE = 0.2
"""Share of clients that attack."""
MOST_ROUNDS = 30
LEAST_ROUNDS = 3
"""Rounds below which a model has not learnt enough to be spoilt."""
NO_ATTACK = "no attack"


def poison(
    plan: Plan,
    left: Callable[[], float],
    round_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Poisoned], str]:
    """Run a plan without attack and under a few, in the time that is left; return results and who attacks, in words.

    All runs have as many rounds as the first, which has none under attack, gets done in its share of the time. None is
    begun whose share is shorter than a round.
    """
    base = quiet(plan).replace({"attack": None, "attackers": {}})
    rules = [base] if plan.aggregator.name == "mean" else [base, base.replace({"aggregator": {"name": "mean"}})]
    num_runs = (1 + len(ATTACKS)) * len(rules)
    found, rounds = list[Poisoned](), min(MOST_ROUNDS, max(plan.rounds, LEAST_ROUNDS))
    for number, with_rule in enumerate(rules):
        for attack, settings in [(NO_ATTACK, None), *ATTACKS]:
            share = left() / max(1, num_runs - len(found))
            rule = with_rule.aggregator.name
            if share <= round_seconds or (found and found[0].why_not == NO_TIME):  # nothing to compare with
                found.append(Poisoned(attack, rule, 0, "", None, why_not=NO_TIME))
                continue
            progress(f"{attack} against {rule}")
            poisoned = with_rule.replace({"rounds": rounds, "stop.seconds": share if found else share / 2})
            if settings is not None:
                poisoned = poisoned.replace({"attack": settings, "attackers.fraction": SHARE})
            found.append(_outcome(poisoned, attack))
            if settings is None and not number and found[-1].value is not None:
                rounds = found[-1].rounds
    return found, f"{SHARE:.0%} of the clients"


def _outcome(plan: Plan, attack: str) -> Poisoned:
    """Run a plan, and return how its model fares on the test set."""
    rule = plan.aggregator.name
    try:
        result = run(plan)
    except AtollError as error:
        return Poisoned(attack, rule, 0, "", None, why_not=str(error))
    except RuntimeError as error:  # of torch: the page is worth more than one attack
        return Poisoned(attack, rule, 0, "", None, why_not=f"{FAILED} {error}")
    figure, rounds = main_of(result.test), result.history[-1]["round"] if result.history else 0
    value = result.test.get(figure, math.nan)
    if not figure or not math.isfinite(value):
        return Poisoned(attack, rule, rounds, "", None, why_not=f"nothing was measured: {result.reason}")
    return Poisoned(attack, rule, rounds, figure, value, result.test.get("attack_success"))
