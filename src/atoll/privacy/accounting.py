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

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.privacy import Draws, Exposure, Mechanism

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")
ANCHOR = 32
"""Every so many attempts the distribution is composed anew; between, one attempt at a time is added."""
ENTRIES = 2000
"""Into about so many intervals the losses of one attempt are sorted: many enough for three digits of epsilon."""
COARSER = 16
"""How many intervals are taken for one where it is only asked whether a client may be the one that spends most."""
ORDERS = (*range(2, 64), 128, 256, 512, 1024)
"""The whole orders of dp-accounting's Renyi accountant: a bound from some of its orders is never below its own."""
LARGE = 1000.0
"""An epsilon above this protects nobody: Renyi divergences say how large it is, at once."""
LARGEST_SIGMA = 1e6
LEAST_DELTA = 1e-12
"""Below, what loss distributions leave out of their tails would count for more than delta."""


class Spent(NamedTuple):
    """What has been given away at most, and what that means."""

    epsilon: float
    delta: float
    unit: str
    neighbours: str
    accountant: str
    assumptions: tuple[str, ...]
    largest: Draws | None = None
    """The client whose samples have spent that, where samples are protected and clients differ."""


def spent(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None = None) -> Spent:
    """The epsilon of what has run, by the tightest accountant that knows the event, or by a given one.

    Where samples are protected, each client is accounted for by its own rate and steps, and the largest epsilon counts.
    """
    epsilon, used, largest = 0.0, str(accountant or "pld"), None
    if exposure.attempts > 0:
        epsilon, used, exposure = _largest(mechanism, exposure, accountant)
        largest = exposure.groups[0] if mechanism.unit == "sample" and exposure.groups else None
    return Spent(
        epsilon=epsilon,
        delta=mechanism.delta,
        unit=mechanism.unit,
        neighbours=mechanism.neighbours,
        accountant=used,
        assumptions=mechanism.assumptions,
        largest=largest,
    )


def knows(mechanism: Mechanism, exposure: Exposure, accountant: Accountant) -> bool:
    """Whether an accountant can add up what a mechanism does."""
    return accountant == "rdp" or spent(mechanism, exposure).accountant == accountant


def _largest(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None) -> tuple[float, str, Exposure]:
    """The largest epsilon of all groups of clients, what found it, and whose it is.

    Groups come in the order of their quick bounds, and the search ends where these are no larger than what was found.
    Before that, a coarser distribution of losses, which costs little and is never below the finer, spares most others.
    """
    groups = exposure.each_group() if mechanism.unit == "sample" else [exposure]
    if len(groups) == 1:
        return *_epsilon(mechanism, groups[0], accountant), groups[0]
    assert mechanism.steps is not None
    bounds = quick_bounds(mechanism.steps.sigma, groups, mechanism.delta)
    best: tuple[float, str, Exposure] | None = None
    for place in np.argsort(-bounds, kind="stable").tolist():
        if best is not None and bounds[place] <= best[0]:
            break
        if (
            best is not None
            and best[1] == "pld"
            and _coarsely(mechanism.steps.sigma, groups[place], mechanism.delta) <= best[0]
        ):
            continue
        found = *_epsilon(mechanism, groups[place], accountant), groups[place]
        best = found if best is None or found[0] > best[0] else best
    assert best is not None
    return best


def _epsilon(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None) -> tuple[float, str]:
    event, delta = mechanism.event(exposure), mechanism.delta
    if accountant != "rdp":
        per_attempt = max(1, mechanism.event(exposure._replace(attempts=1)).count) if _is_repeated(event) else 1
        found = _by_pld(event, delta, per_attempt)
        if found is not None:
            return found, "pld"
        if accountant == "pld":
            raise PlanError("loss distributions are not known for this mechanism: use Renyi divergences")
    return by_rdp(event, delta), "rdp"


def quick_bounds(sigma: float, exposures: list[Exposure], delta: float) -> np.ndarray:
    """An upper bound on the epsilon of private steps for each exposure, from Renyi divergences of whole order."""
    rates, counts = tuple(each.sample_rate for each in exposures), [each.attempts * each.steps for each in exposures]
    return _converted(_divergences(sigma, rates) * np.array(counts)[:, None], delta)


@lru_cache(maxsize=64)
def _divergences(sigma: float, rates: tuple[float, ...]) -> np.ndarray:
    """Renyi divergences of one sampled Gaussian, a row for each rate and a column for each of ORDERS.

    (alpha - 1) D = log sum_k C(alpha, k) (1 - q)^(alpha - k) q^k exp(k (k - 1) / 2 sigma^2) for whole orders alpha
    (Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3).
    """
    from scipy.special import gammaln, logsumexp, xlog1py, xlogy

    rate_G1, columns = np.array(rates)[:, None], []
    for alpha in ORDERS:
        k = np.arange(alpha + 1)
        chosen = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
        terms = chosen + xlog1py(alpha - k, -rate_G1) + xlogy(k, rate_G1) + k * (k - 1) / (2 * sigma**2)
        columns.append(logsumexp(terms, axis=1) / (alpha - 1))
    return np.stack(columns, axis=1)


def _converted(divergences: np.ndarray, delta: float) -> np.ndarray:
    """The least epsilon over all of ORDERS (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12)."""
    alphas = np.array(ORDERS)
    each = divergences + np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)
    found: np.ndarray = each.min(axis=1).clip(min=0)
    return found


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
        with np.errstate(divide="ignore"):  # the library takes the logarithm of 0 where delta is tiny
            return float(dp.get_epsilon_gaussian(inner.noise_multiplier / math.sqrt(count), delta))
    if not isinstance(inner, dp.PoissonSampledDpEvent) or not isinstance(inner.event, dp.GaussianDpEvent):
        return None
    sigma, rate = inner.event.noise_multiplier, inner.sampling_probability
    if delta < LEAST_DELTA or _is_large(sigma, rate, count, delta):
        return None
    settings = (sigma, rate, per_attempt)
    attempts, rest = divmod(count, per_attempt)
    assert rest == 0, "attempts are alike"
    found = _epsilon_of(settings, attempts, delta)
    return found if math.isfinite(found) else None


def _is_large(sigma: float, rate: float, count: int, delta: float) -> bool:
    """Whether so many sampled Gaussians may cost more than LARGE."""
    return float(_converted(_divergences(sigma, (rate,)) * count, delta)[0]) > LARGE


@lru_cache(maxsize=64)
def _epsilon_of(settings: tuple[float, float, int], attempts: int, delta: float) -> float:
    return float(_composed(settings, attempts).get_epsilon_for_delta(delta))


@lru_cache(maxsize=32)
def _once(settings: tuple[float, float, int]) -> Any:
    """The privacy loss distribution of one attempt."""
    one = _one_step(settings, 1)
    return one.self_compose(settings[2]) if settings[2] > 1 else one


def _coarsely(sigma: float, exposure: Exposure, delta: float) -> float:
    """Epsilon of private steps from losses that are rounded up to COARSER intervals; no less than the finer one."""
    settings, count = (sigma, exposure.sample_rate, exposure.steps), exposure.attempts * exposure.steps
    return float(_one_step(settings, COARSER).self_compose(count).get_epsilon_for_delta(delta))


def _one_step(settings: tuple[float, float, int], times: int) -> Any:
    """The privacy loss distribution of one step, always rounded up, in about ENTRIES / times intervals.

    Rounding costs about n h^2 for n steps and an interval h, so that h shrinks with the steps of an attempt.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    sigma, rate, steps = settings
    largest = 0.5 / sigma**2 + 8 / sigma  # of a Gaussian's loss, but for 1e-15
    span = largest + math.log(rate + (1 - rate) * math.exp(-largest))
    interval = min(0.01, max(1e-4, span / ENTRIES / math.sqrt(steps)))
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        value_discretization_interval=times * interval,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )


@lru_cache(maxsize=64)
def _composed(settings: tuple[float, float, int], attempts: int) -> Any:
    """The distribution of so many attempts: the same for a number of attempts, however it was come to."""
    since = attempts % ANCHOR
    if attempts == 1 or since == 0:
        return _once(settings) if attempts == 1 else _once(settings).self_compose(attempts)
    return _composed(settings, attempts - 1).compose(_once(settings))


def by_rdp(event: Any, delta: float) -> float:
    """Epsilon by Renyi divergences; an order that the library leaves out, with a warning, only makes it larger."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    return float(accountant.compose(event).get_epsilon(delta))


def calibrated(mechanism_of: Callable[[float], Mechanism], exposure: Exposure, epsilon: float) -> float:
    """The least sigma, to four digits upwards, whose mechanism spends at most `epsilon` on what will run."""
    low, high = 0.01, 1.0
    while spent(mechanism_of(high), exposure).epsilon > epsilon:
        if high >= LARGEST_SIGMA:
            raise PlanError(
                f"no sigma up to {high:g} spends as little as epsilon {epsilon:g} on {exposure.attempts} rounds: allow "
                "a larger epsilon or delta, or plan fewer rounds"
            )
        low, high = high, min(LARGEST_SIGMA, high * 2)
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(mechanism_of(middle), exposure).epsilon <= epsilon else (middle, high)
    rounded = math.ceil(high * 1e4) / 1e4
    return rounded
