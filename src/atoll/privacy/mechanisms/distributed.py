"""Client-level privacy by noise that clients add jointly: the distributed discrete Gaussian."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any

import torch

from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update, stack
from atoll.core.options import Range, at_least
from atoll.core.privacy import IN_TURN, Exposure, Mechanism, ReleaseContext, SendContext
from atoll.privacy.grid import CLIENT_DATA, check_noise, noisy_share, packed, unpacked

FIXED = (IN_TURN, "fixed-size without replacement")
"""Sampling schemes that ask a fixed number of clients, each at most once a round."""
COARSEST = 8.0
"""Minimum standard deviation of one share, in steps of the grid, for the sum to be close enough to a Gaussian."""
FAR = 12.0
"""Number of standard deviations that the noise exceeds with negligible probability."""

ASSUMPTIONS = (
    "only the sum of a round is seen: put the plan behind secagg, without which it is added up in the open",
    "at least the cohort less `dropouts` clients answer honestly with their share of the noise, or nothing is released",
    "that a client took part, and when, and how many samples it has, is not hidden",
    "the sum of the shares is accounted for as in Kairouz, Liu and Steinke 2021",
)


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}


def distributed(
    clip: float,
    sigma: float,
    delta: float,
    epsilon: float | None = None,
    dropouts: Annotated[int, at_least(0, "0 expects every client to answer")] = 0,
    bits: Annotated[int, Range(4, 24, hint="16 is usual")] = 16,
    test_noise: bool = False,
) -> Mechanism:
    """Let each of n clients add a share of the noise on the integer grid (Kairouz et al. 2021, arXiv:2102.06387).

    A client clips its update, truncates it to whole steps of clip / 2^bits, and adds discrete Gaussian noise of
    standard deviation sigma * clip / sqrt(n - dropouts), so that the sum has at least sigma * clip if no more than
    `dropouts` clients are lost; an attempt that loses more is abandoned. Truncation towards zero replaces the paper's
    conditional rounding: no norm grows, so that the sensitivity is the clip itself.
    """
    check_noise("distributed", delta, epsilon, clip=clip, sigma=sigma)
    levels = 1 << bits
    deviation = partial(share_deviation, sigma, bits, dropouts)

    def event(exposure: Exposure) -> Any:
        import dp_accounting as dp

        if exposure.scheme not in FIXED:
            raise PlanError(
                "distributed noise is divided among a fixed number of clients, but here they are drawn "
                f'{exposure.scheme}: set sampler = "round_robin", or sampler = "uniform" without replacement'
            )
        cohort = exposure.cohort
        round_event = dp.GaussianDpEvent(1 / concentrated(deviation(cohort), cohort, dropouts, levels))
        return dp.SelfComposedDpEvent(round_event, exposure.participations)

    def on_grid(update: Update, context: SendContext) -> Update:
        noisy = []
        for number in range(len(update.weight)):
            row = update.rows(number)
            steps_V = noisy_share(row.vector(), clip, levels, deviation(context.cohort), context.key(number))
            noisy.append(row.rebuilt(torch.from_numpy(steps_V)))
        return stack(noisy)

    def release(acc: State, memory: State, context: ReleaseContext) -> tuple[Aggregate, State]:
        cohort = context.exposure.cohort
        return unpacked(packed(acc), acc, clip / levels / cohort, context.dtype, cohort), memory

    return Mechanism(
        unit="client",
        neighbours=CLIENT_DATA,
        delta=delta,
        epsilon=epsilon,
        event=event,
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        clip=clip,
        on_grid=on_grid,
        release=release,
        sum_bound=lambda cohort: cohort * levels + FAR * math.sqrt(cohort) * deviation(cohort),
        min_reports=lambda cohort: cohort - dropouts,
    )


def share_deviation(sigma: float, bits: int, dropouts: int, cohort: int) -> float:
    """Return the standard deviation of one client's share of the noise, in steps of the grid; refuse a coarse grid."""
    if dropouts >= cohort:
        raise PlanError(f"distributed: {dropouts} of {cohort} clients cannot drop out: lower privacy.dropouts")
    steps = sigma * (1 << bits) / math.sqrt(cohort - dropouts)
    if steps < COARSEST:
        raise PlanError(
            f"distributed: a client's share of the noise has a deviation of {steps:.2g} steps of the grid, which "
            f"is too coarse: raise privacy.bits from {bits} so that it has at least {COARSEST:g}"
        )
    return steps


def concentrated(deviation: float, cohort: int, dropouts: int, levels: int, dimensions: float = 2.0**40) -> float:
    """Return the e of e^2/2-concentrated privacy of a sum of discrete Gaussians (proposition 14, its last bound).

    e = levels / (sqrt(n) deviation) + tau sqrt(d) with n = cohort - dropouts summands at least, and
    tau = 10 sum_{k < cohort} exp(-2 pi^2 deviation^2 k / (k + 1)). The default d exceeds the dimension of every model.
    The Renyi divergence is that of a Gaussian with noise multiplier 1 / e.

    >>> round(concentrated(100.0, 6, 2, 200), 6)
    1.0
    """
    tau = 10 * math.fsum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, cohort))
    return levels / (math.sqrt(cohort - dropouts) * deviation) + tau * math.sqrt(dimensions)
