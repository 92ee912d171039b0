"""Composition of the events of several runs, and their form as plain data.

The events themselves are composed: a sum of the runs' epsilons would be much larger.
"""

from __future__ import annotations

import math
from typing import Any

from atoll.core.errors import RunError
from atoll.privacy.accounting import LARGE, LEAST_DELTA, rdp_epsilon

INTERVAL = 1e-3
"""Length of the intervals of loss distributions for 100 steps; rounding adds about the steps times its square."""


def as_plain(event: Any) -> dict[str, Any]:
    """Return an event as plain data; refuse one that no mechanism of Atoll emits."""
    import dp_accounting as dp

    match event:
        case dp.GaussianDpEvent():
            return {"gaussian": event.noise_multiplier}
        case dp.PoissonSampledDpEvent():
            return {"rate": event.sampling_probability, "of": as_plain(event.event)}
        case dp.SelfComposedDpEvent():
            return {"times": event.count, "of": as_plain(event.event)}
        case dp.ComposedDpEvent():
            return {"all": [as_plain(inner) for inner in event.events]}
        case dp.SingleEpochTreeAggregationDpEvent():
            return {"tree": event.noise_multiplier, "steps": event.step_counts}
    raise RunError(
        f"an event of type {type(event).__name__} cannot be composed with those of other runs: use a mechanism of Atoll"
    )


def as_event(plain: dict[str, Any]) -> Any:
    """Undo `as_plain`.

    >>> as_event({"times": 3, "of": {"gaussian": 2.0}}).count
    3
    """
    import dp_accounting as dp

    match plain:
        case {"gaussian": sigma}:
            return dp.GaussianDpEvent(sigma)
        case {"rate": rate, "of": inner}:
            return dp.PoissonSampledDpEvent(rate, as_event(inner))
        case {"times": count, "of": inner}:
            return dp.SelfComposedDpEvent(as_event(inner), count)
        case {"all": inners}:
            return dp.ComposedDpEvent([as_event(inner) for inner in inners])
        case {"tree": sigma, "steps": steps}:
            return dp.SingleEpochTreeAggregationDpEvent(sigma, steps)
    raise RunError(f"{plain} is not an event that can be accounted for: restore the file that it was read from")


def spent_together(events: list[Any], delta: float, most: float | None = None) -> tuple[float, str]:
    """Return the epsilon of all events together at one delta, and the accountant that computed it.

    Renyi divergences are quick and enough if they show at most `most`. Else privacy loss distributions are tried,
    which take longer and are tighter.
    """
    import dp_accounting as dp

    epsilon = rdp_epsilon(dp.ComposedDpEvent(events), delta) if events else 0.0
    if epsilon > LARGE or delta < LEAST_DELTA or (most is not None and epsilon <= most):
        return epsilon, "rdp"
    tighter = _pld_epsilon(_leaves(events, 1), delta)
    return (epsilon, "rdp") if tighter is None or tighter >= epsilon else (tighter, "pld")


def _leaves(events: list[Any], times: int) -> list[tuple[Any, int]]:
    """Return the elementary events inside composed ones, each with its number of repetitions."""
    import dp_accounting as dp

    leaves: list[tuple[Any, int]] = []
    for event in events:
        if isinstance(event, dp.ComposedDpEvent):
            leaves += _leaves(event.events, times)
        elif isinstance(event, dp.SelfComposedDpEvent):
            leaves += _leaves([event.event], times * event.count)
        else:
            leaves.append((event, times))
    return leaves


def _pld_epsilon(leaves: list[tuple[Any, int]], delta: float) -> float | None:
    """Return epsilon by privacy loss distributions of (sampled) Gaussians; None if there is any other event."""
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    if any(isinstance(event, dp.SingleEpochTreeAggregationDpEvent) for event, _ in leaves):
        return None
    steps = sum(count for _, count in leaves)
    accountant = PLDAccountant(
        neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL,
        value_discretization_interval=max(1e-4, INTERVAL / math.sqrt(max(1.0, steps / 100))),
    )
    for event, count in leaves:
        accountant.compose(event, count)
    epsilon = float(accountant.get_epsilon(delta))
    return epsilon if math.isfinite(epsilon) else None
