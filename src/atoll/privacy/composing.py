"""What several runs spend together: their events, written down as plain data, and composed.

Events are composed themselves, not their epsilons, which would add up to much more.
"""

from __future__ import annotations

import math
from typing import Any

from atoll.core.errors import RunError
from atoll.privacy.accounting import LARGE, LEAST_DELTA, by_rdp

INTERVAL = 1e-3
"""Into intervals of this length losses are sorted; what rounding them up adds is about the steps times its square."""


def as_plain(event: Any) -> dict[str, Any]:
    """An event as plain data; one that no mechanism of Atoll emits is refused."""
    import dp_accounting as dp

    match event:
        case dp.GaussianDpEvent():
            return {"gaussian": event.noise_multiplier}
        case dp.PoissonSampledDpEvent():
            return {"rate": event.sampling_probability, "of": as_plain(event.event)}
        case dp.SelfComposedDpEvent():
            return {"times": event.count, "of": as_plain(event.event)}
        case dp.ComposedDpEvent():
            return {"all": [as_plain(each) for each in event.events]}
        case dp.SingleEpochTreeAggregationDpEvent():
            return {"tree": event.noise_multiplier, "steps": event.step_counts}
    raise RunError(f"an event of kind {type(event).__name__} cannot be added to those of other runs")


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
        case {"all": each}:
            return dp.ComposedDpEvent([as_event(one) for one in each])
        case {"tree": sigma, "steps": steps}:
            return dp.SingleEpochTreeAggregationDpEvent(sigma, steps)
    raise RunError(f"{plain} is no event that can be accounted for")


def spent_together(events: list[Any], delta: float, most: float | None = None) -> tuple[float, str]:
    """The epsilon of all events at one delta, and the accountant: Renyi divergences where these show less than `most`.

    They are quick. Where they show more, privacy loss distributions are tried, which take longer and are tighter.
    """
    import dp_accounting as dp

    epsilon = by_rdp(dp.ComposedDpEvent(events), delta) if events else 0.0
    if epsilon > LARGE or delta < LEAST_DELTA or (most is not None and epsilon <= most):
        return epsilon, "rdp"
    tighter = _by_pld(_leaves(events, 1), delta)
    return (epsilon, "rdp") if tighter is None or tighter >= epsilon else (tighter, "pld")


def _leaves(events: list[Any], times: int) -> list[tuple[Any, int]]:
    """The single mechanisms that events are made of, and how often each has run."""
    import dp_accounting as dp

    found: list[tuple[Any, int]] = []
    for event in events:
        if isinstance(event, dp.ComposedDpEvent):
            found += _leaves(event.events, times)
        elif isinstance(event, dp.SelfComposedDpEvent):
            found += _leaves([event.event], times * event.count)
        else:
            found.append((event, times))
    return found


def _by_pld(leaves: list[tuple[Any, int]], delta: float) -> float | None:
    """Epsilon by privacy loss distributions of Gaussians, sampled or not; None if there is anything else."""
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
    found = float(accountant.get_epsilon(delta))
    return found if math.isfinite(found) else None
