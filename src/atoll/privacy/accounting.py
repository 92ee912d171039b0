"""What a mechanism has spent, by the dp-accounting library: privacy loss distributions, or Renyi divergences.

A mechanism emits its event; here it is only handed to an accountant. One number a round must cost little, so that what
does not change from round to round is kept: the distribution of one attempt, and those of the attempts before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from atoll.core.errors import PlanError
from atoll.core.privacy import Exposure, Mechanism

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")
ANCHOR = 32
"""Every so many attempts the distribution is composed anew; between, one attempt at a time is added."""
ENTRIES = 2000
"""Into about so many intervals the losses of one attempt are sorted: many enough for three digits of epsilon."""


class Spent(NamedTuple):
    """What has been given away at most, and what that means."""

    epsilon: float
    delta: float
    unit: str
    neighbours: str
    accountant: str
    assumptions: tuple[str, ...]


def spent(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None = None) -> Spent:
    """The epsilon of what has run, by the tightest accountant that knows the event, or by a given one."""
    if exposure.attempts == 0:
        epsilon, used = 0.0, str(accountant or "pld")
    else:
        epsilon, used = _epsilon(mechanism, exposure, accountant)
    return Spent(epsilon, mechanism.delta, mechanism.unit, mechanism.neighbours, used, mechanism.assumptions)


def knows(mechanism: Mechanism, exposure: Exposure, accountant: Accountant) -> bool:
    """Whether an accountant can add up what a mechanism does."""
    return accountant == "rdp" or spent(mechanism, exposure._replace(attempts=1)).accountant == accountant


def _epsilon(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None) -> tuple[float, str]:
    event, delta = mechanism.event(exposure), mechanism.delta
    if accountant != "rdp":
        per_attempt = max(1, mechanism.event(exposure._replace(attempts=1)).count) if _is_repeated(event) else 1
        found = _by_pld(event, delta, per_attempt)
        if found is not None:
            return found, "pld"
        if accountant == "pld":
            raise PlanError("loss distributions are not known for this mechanism: use Renyi divergences")
    return _by_rdp(event, delta, mechanism.zeroed), "rdp"


def _is_repeated(event: Any) -> bool:
    import dp_accounting as dp

    return isinstance(event, dp.SelfComposedDpEvent)


def _by_pld(event: Any, delta: float, per_attempt: int) -> float | None:
    """Epsilon by privacy loss distributions, for (sampled) Gaussians that are repeated; None for anything else."""
    import dp_accounting as dp

    if not _is_repeated(event):
        return None
    inner, count = event.event, event.count
    if isinstance(inner, dp.PoissonSampledDpEvent) and inner.sampling_probability == 1:
        inner = inner.event
    if isinstance(inner, dp.GaussianDpEvent):
        return float(dp.get_epsilon_gaussian(inner.noise_multiplier / math.sqrt(count), delta))
    if not isinstance(inner, dp.PoissonSampledDpEvent) or not isinstance(inner.event, dp.GaussianDpEvent):
        return None
    settings = (inner.event.noise_multiplier, inner.sampling_probability, per_attempt)
    attempts, rest = divmod(count, per_attempt)
    assert rest == 0, "attempts are alike"
    return _epsilon_of(settings, attempts, delta)


@lru_cache(maxsize=8)
def _epsilon_of(settings: tuple[float, float, int], attempts: int, delta: float) -> float:
    return float(_composed(settings, attempts).get_epsilon_for_delta(delta))


@lru_cache(maxsize=4)
def _once(settings: tuple[float, float, int]) -> Any:
    """The privacy loss distribution of one attempt, always rounded up, in about ENTRIES intervals.

    Rounding costs about n h^2 for n steps and an interval h, so that h shrinks with the steps of an attempt.
    """
    from dp_accounting.pld import privacy_loss_distribution

    sigma, rate, steps = settings
    largest = 0.5 / sigma**2 + 8 / sigma  # of a Gaussian's loss, but for 1e-15
    span = largest + math.log(rate + (1 - rate) * math.exp(-largest))
    interval = min(0.01, max(1e-4, span / ENTRIES / math.sqrt(steps)))
    one = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )
    return one.self_compose(steps) if steps > 1 else one


@lru_cache(maxsize=8)
def _composed(settings: tuple[float, float, int], attempts: int) -> Any:
    """The distribution of so many attempts: the same for a number of attempts, however it was come to."""
    since = attempts % ANCHOR
    if attempts == 1 or since == 0:
        return _once(settings) if attempts == 1 else _once(settings).self_compose(attempts)
    return _composed(settings, attempts - 1).compose(_once(settings))


def _by_rdp(event: Any, delta: float, zeroed: bool) -> float:
    """Epsilon by Renyi divergences; an order that the library leaves out, with a warning, only makes it larger."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    relations = dp.NeighboringRelation
    relation = relations.REPLACE_SPECIAL if zeroed else relations.ADD_OR_REMOVE_ONE
    logging.getLogger("absl").setLevel(logging.ERROR)
    return float(RdpAccountant(neighboring_relation=relation).compose(event).get_epsilon(delta))


def calibrated(mechanism_of: Callable[[float], Mechanism], exposure: Exposure, epsilon: float) -> float:
    """The least sigma, to four digits upwards, whose mechanism spends at most `epsilon` on what will run."""
    low, high = 0.01, 1.0
    while spent(mechanism_of(high), exposure).epsilon > epsilon:
        low, high = high, high * 2
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(mechanism_of(middle), exposure).epsilon <= epsilon else (middle, high)
    rounded = math.ceil(high * 1e4) / 1e4
    return rounded
