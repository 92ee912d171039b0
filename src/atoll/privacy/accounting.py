"""Privacy accounting by the dp-accounting library: privacy loss distributions (PLD) or Renyi divergences (RDP).

A mechanism emits its event, and an accountant composes it. A run asks for one epsilon a round, so what does not change
between rounds is cached: the loss distribution of one attempt, and those of the attempts before.
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
"""Attempts between two distributions that are composed from scratch; the others add one attempt to the one before."""
ENTRIES = 2000
"""Approximate number of intervals of the loss distribution of one attempt; it gives three digits of epsilon."""
COARSER = 16
"""Number of intervals that are merged into one for a quick upper bound on a client's epsilon."""
ORDERS = (*range(2, 64), 128, 256, 512, 1024)
"""The whole orders of dp-accounting's Renyi accountant: a bound from a subset of its orders is never below its own."""
LARGE = 1000.0
"""Epsilon above which only Renyi divergences are used: such an epsilon gives no protection and needs no precision."""
LARGEST_SIGMA = 1e6
LEAST_DELTA = 1e-12
"""Smallest delta for loss distributions: below it, the mass that they cut off their tails exceeds delta."""


class Spent(NamedTuple):
    """An upper bound on the privacy loss, and what it refers to."""

    epsilon: float
    delta: float
    unit: str
    neighbours: str
    accountant: str
    assumptions: tuple[str, ...]
    largest: Draws | None = None
    """The client whose samples have this epsilon, where samples are protected and clients differ."""


class SampledGaussian(NamedTuple):
    """The private steps of one attempt: Poisson-sampled Gaussians that are composed `steps` times."""

    sigma: float
    rate: float
    steps: int


def spent(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None = None) -> Spent:
    """Return the epsilon of an exposure, by `accountant` or else by the tightest that supports the event.

    Where samples are protected, each client is accounted for by its own rate and steps, and the largest epsilon counts.
    """
    epsilon, used, largest = 0.0, str(accountant or "pld"), None
    if exposure.attempts > 0:
        epsilon, used, exposure = _largest_epsilon(mechanism, exposure, accountant)
        largest = exposure.groups[0] if mechanism.steps is not None and exposure.groups else None
    return Spent(
        epsilon=epsilon,
        delta=mechanism.delta,
        unit=mechanism.unit,
        neighbours=mechanism.neighbours,
        accountant=used,
        assumptions=mechanism.assumptions,
        largest=largest,
    )


def supports(mechanism: Mechanism, exposure: Exposure, accountant: Accountant) -> bool:
    """Return whether an accountant can compose the events of a mechanism."""
    return accountant == "rdp" or spent(mechanism, exposure).accountant == accountant


def _largest_epsilon(
    mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None
) -> tuple[float, str, Exposure]:
    """Return the largest epsilon over all groups of clients, the accountant that computed it, and the group's exposure.

    Groups are tried in descending order of their quick upper bounds, and the search ends at the first bound that does
    not exceed the largest epsilon so far. A coarser loss distribution, which is cheap and never below the exact
    epsilon, excludes most of the remaining groups.
    """
    groups = exposure.per_group() if mechanism.steps is not None else [exposure]
    if mechanism.steps is None or len(groups) == 1:
        return *_epsilon(mechanism, groups[0], accountant), groups[0]
    bounds = quick_bounds(mechanism.steps.sigma, groups, mechanism.delta)
    best: tuple[float, str, Exposure] | None = None
    for index in np.argsort(-bounds, kind="stable").tolist():
        if best is not None and bounds[index] <= best[0]:
            break
        if (
            best is not None
            and best[1] == "pld"
            and _coarse_epsilon(mechanism.steps.sigma, groups[index], mechanism.delta) <= best[0]
        ):
            continue
        candidate = *_epsilon(mechanism, groups[index], accountant), groups[index]
        best = candidate if best is None or candidate[0] > best[0] else best
    assert best is not None
    return best


def _epsilon(mechanism: Mechanism, exposure: Exposure, accountant: Accountant | None) -> tuple[float, str]:
    """Return the epsilon of one exposure, and the accountant that computed it."""
    event, delta = mechanism.event(exposure), mechanism.delta
    if accountant != "rdp":
        per_attempt = max(1, mechanism.event(exposure._replace(attempts=1)).count) if _is_repeated(event) else 1
        epsilon = _pld_epsilon(event, delta, per_attempt)
        if epsilon is not None:
            return epsilon, "pld"
        if accountant == "pld":
            raise PlanError(
                "privacy loss distributions do not cover this mechanism: use the accountant rdp (Renyi divergences)"
            )
    return rdp_epsilon(event, delta), "rdp"


def quick_bounds(sigma: float, exposures: list[Exposure], delta: float) -> np.ndarray:
    """Return an upper bound on the epsilon of private steps for each exposure, from Renyi divergences of ORDERS."""
    rates = tuple(exposure.sample_rate for exposure in exposures)
    counts = [exposure.attempts * exposure.steps for exposure in exposures]
    return _best_epsilon(_divergences(sigma, rates) * np.array(counts)[:, None], delta)


@lru_cache(maxsize=64)
def _divergences(sigma: float, rates: tuple[float, ...]) -> np.ndarray:
    """Return the Renyi divergences of one sampled Gaussian, a row for each rate and a column for each of ORDERS.

    (alpha - 1) D = log sum_k C(alpha, k) (1 - q)^(alpha - k) q^k exp(k (k - 1) / 2 sigma^2) for whole orders alpha
    (Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3).
    """
    from scipy.special import gammaln, logsumexp, xlog1py, xlogy

    rate_G1, columns = np.array(rates)[:, None], []
    for alpha in ORDERS:
        k = np.arange(alpha + 1)
        log_binomial = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
        terms = log_binomial + xlog1py(alpha - k, -rate_G1) + xlogy(k, rate_G1) + k * (k - 1) / (2 * sigma**2)
        columns.append(logsumexp(terms, axis=1) / (alpha - 1))
    return np.stack(columns, axis=1)


def _best_epsilon(divergences: np.ndarray, delta: float) -> np.ndarray:
    """Return the least epsilon over ORDERS for each row (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, prop. 12).

    epsilon = D_alpha + log(1 - 1/alpha) - (log delta + log alpha) / (alpha - 1)
    """
    alphas = np.array(ORDERS)
    epsilons = divergences + np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)
    least: np.ndarray = epsilons.min(axis=1).clip(min=0)
    return least


def _is_repeated(event: Any) -> bool:
    import dp_accounting as dp

    return isinstance(event, dp.SelfComposedDpEvent)


def _pld_epsilon(event: Any, delta: float, per_attempt: int) -> float | None:
    """Return epsilon by privacy loss distributions for repeated (sampled) Gaussians; None for any other event."""
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
    if delta < LEAST_DELTA or _may_be_large(sigma, rate, count, delta):
        return None
    attempts, rest = divmod(count, per_attempt)
    assert rest == 0, "all attempts have the same number of steps"
    epsilon = _composed_epsilon(SampledGaussian(sigma, rate, per_attempt), attempts, delta)
    return epsilon if math.isfinite(epsilon) else None


def _may_be_large(sigma: float, rate: float, count: int, delta: float) -> bool:
    """Return whether the quick bound on the epsilon of `count` sampled Gaussians exceeds LARGE."""
    return float(_best_epsilon(_divergences(sigma, (rate,)) * count, delta)[0]) > LARGE


@lru_cache(maxsize=64)
def _composed_epsilon(attempt: SampledGaussian, attempts: int, delta: float) -> float:
    return float(_composed_loss(attempt, attempts).get_epsilon_for_delta(delta))


def _coarse_epsilon(sigma: float, exposure: Exposure, delta: float) -> float:
    """Return an upper bound on the epsilon of private steps, from losses rounded up to COARSER intervals."""
    step = SampledGaussian(sigma, exposure.sample_rate, exposure.steps)
    count = exposure.attempts * exposure.steps
    return float(_step_loss(step, COARSER).self_compose(count).get_epsilon_for_delta(delta))


def _step_loss(attempt: SampledGaussian, coarser: int) -> Any:
    """Return the privacy loss distribution of one step, always rounded up, in about ENTRIES / coarser intervals.

    Rounding costs about n h^2 for n steps and an interval h, so that h shrinks with the steps of an attempt.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    sigma, rate, steps = attempt
    largest = 0.5 / sigma**2 + 8 / sigma  # a Gaussian's loss exceeds it with probability 1e-15
    span = largest + math.log(rate + (1 - rate) * math.exp(-largest))
    interval = min(0.01, max(1e-4, span / ENTRIES / math.sqrt(steps)))
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        value_discretization_interval=coarser * interval,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )


@lru_cache(maxsize=32)
def _attempt_loss(attempt: SampledGaussian) -> Any:
    """Return the privacy loss distribution of one attempt."""
    step = _step_loss(attempt, 1)
    return step.self_compose(attempt.steps) if attempt.steps > 1 else step


@lru_cache(maxsize=64)
def _composed_loss(attempt: SampledGaussian, attempts: int) -> Any:
    """Return the loss distribution of all attempts; it depends on their number alone, also after a resume."""
    if attempts == 1:
        return _attempt_loss(attempt)
    if attempts % ANCHOR == 0:
        return _attempt_loss(attempt).self_compose(attempts)
    return _composed_loss(attempt, attempts - 1).compose(_attempt_loss(attempt))


def rdp_epsilon(event: Any, delta: float) -> float:
    """Return epsilon by Renyi divergences. The library skips some orders with a warning; epsilon only grows by that."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    return float(accountant.compose(event).get_epsilon(delta))


def calibrate_sigma(mechanism_of: Callable[[float], Mechanism], exposure: Exposure, epsilon: float) -> float:
    """Return the least sigma, rounded up to four decimals, whose mechanism spends at most `epsilon` on an exposure."""
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
    return math.ceil(high * 1e4) / 1e4
