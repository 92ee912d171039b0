"""Client-level privacy with a trusted server: DP-FedAvg."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update
from atoll.core.privacy import Exposure, Mechanism, ReleaseContext, SendContext
from atoll.privacy.grid import BIT, LEVELS, bounded, check_noise, lengths, packed, unpacked
from atoll.privacy.noise import derived, discrete_gaussian

ASSUMPTIONS = (
    "the server is trusted: it sees each update, and what it publishes is protected",
    "who was asked stays secret, and so do how many were, the ledger and the checkpoint",
    "the noise is an exact discrete Gaussian on a grid of clip / 2^24, accounted for as the Gaussian of its sigma, "
    "from which it differs by less than the accountant rounds up",
    "how long a round takes is not protected",
)


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "quantile": 0.5, "test_noise": True}


class AdaptiveClip(NamedTuple):
    """A clip that follows a quantile of the updates' norms (Andrew et al. 2021, arXiv:1905.03871, algorithm 1)."""

    quantile: float
    bit_sigma: float | None
    """Standard deviation of the noise on the count of updates within the clip, in clients; None for cohort / 20."""
    lr: float

    def sigmas(self, sigma: float, exposure: Exposure) -> tuple[float, float]:
        """Return the noise on the sum, in clips, and on the count, in clients, which together cost what `sigma` does.

        z_delta = (sigma^-2 - (2 bit_sigma)^-2)^(-1/2)
        """
        on_count = exposure.cohort / 20 if self.bit_sigma is None else self.bit_sigma
        if not on_count > sigma / 2:
            raise PlanError(
                f"central: with {exposure.cohort} clients a round, the count of an adaptive clip would use the whole "
                f"privacy budget: set privacy.bit_sigma above sigma / 2 = {sigma / 2}, or ask more clients"
            )
        return (sigma**-2 - (2 * on_count) ** -2) ** -0.5, on_count

    def add_bits(self, clipped: Update, update: Update, clip: float) -> Update:
        """Add to each clipped update whether it was within the clip, as 1/2 or -1/2 on the grid: sensitivity 1/2."""
        length_C = lengths(update)
        bit_C = torch.where(length_C <= clip, LEVELS // 2, -LEVELS // 2)
        bit_C[~length_C.isfinite()] = 0
        return clipped._replace(aux={**clipped.aux, BIT: bit_C[:, None]})

    def next_clip(self, clip: float, count: np.ndarray, expected: float) -> State:
        """Return the clip of the next round from the noisy count of updates within the current one."""
        within = min(1.0, max(0.0, float(count[0]) / LEVELS / expected + 0.5))
        adapted = clip * math.exp(-self.lr * (within - self.quantile))
        return {"clip": torch.tensor(adapted, dtype=torch.float64)}


def central(
    clip: float,
    sigma: float,
    delta: float,
    epsilon: float | None = None,
    per_layer: bool = False,
    quantile: float | None = None,
    bit_sigma: float | None = None,
    clip_lr: float = 0.2,
    test_noise: bool = False,
) -> Mechanism:
    """Clip each update, add them up, add noise once, divide by q N (McMahan et al. 2018, arXiv:1710.06963, alg. 1).

    All clients have the same weight, and the denominator is the expected cohort, so that one client moves the released
    mean by at most clip / (q N). `per_layer` clips each of L layers to clip / sqrt(L). With `quantile` the clip follows
    that quantile of the updates' norms, and `clip` is its first value: the number of updates within the clip is
    released with noise `bit_sigma` (by default expected cohort / 20), and the noise on the sum grows so that both
    together cost what `sigma` alone would.
    """
    check_noise("central", delta, epsilon, clip=clip, sigma=sigma)
    _check_adaptive(sigma, per_layer, quantile, bit_sigma)
    adaptive = None if quantile is None else AdaptiveClip(quantile, bit_sigma, clip_lr)

    def on_grid(update: Update, context: SendContext) -> Update:
        clipped = bounded(update, context.clip, LEVELS, context.spec if per_layer else None)
        return clipped if adaptive is None else adaptive.add_bits(clipped, update, context.clip)

    return Mechanism(
        unit="client",
        neighbours="one client with all its samples, or nobody in its place (zero-out): how many clients there are is "
        "the same, and no secret",
        delta=delta,
        epsilon=epsilon,
        event=partial(_event, sigma, adaptive),
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        clip=clip,
        init=(lambda: {}) if adaptive is None else (lambda: {"clip": torch.tensor(clip, dtype=torch.float64)}),
        clip_of=None if adaptive is None else _adapted_clip,
        on_grid=on_grid,
        release=partial(_release, clip, sigma, adaptive),
        hides_cohort=True,
        min_reports=lambda cohort: 0,  # an empty cohort releases noise too, since a missing release would reveal it
    )


def _check_adaptive(sigma: float, per_layer: bool, quantile: float | None, bit_sigma: float | None) -> None:
    """Refuse options of an adaptive clip that do not fit each other."""
    if quantile is not None and not 0 < quantile < 1:
        raise PlanError(f"central: quantile is a share in (0, 1), got {quantile}; 0.5 is usual")
    if quantile is not None and per_layer:
        raise PlanError("central: an adaptive clip is one number for the whole update: leave out per_layer or quantile")
    if quantile is None and bit_sigma is not None:
        raise PlanError(
            "central: bit_sigma is the noise on the count of an adaptive clip: set quantile, or leave out bit_sigma"
        )
    if bit_sigma is not None and not bit_sigma > sigma / 2:
        raise PlanError(
            f"central: bit_sigma must be above sigma / 2 = {sigma / 2}, got {bit_sigma}: the noisy count alone would "
            "cost more than sigma allows; raise bit_sigma"
        )


def _event(sigma: float, adaptive: AdaptiveClip | None, exposure: Exposure) -> Any:
    """Return the event of all attempts: Poisson-sampled Gaussians."""
    import dp_accounting as dp

    if exposure.scheme != "poisson":
        raise PlanError(
            "central privacy is accounted for clients that are drawn by independent coins, but here they are "
            f'drawn {exposure.scheme}: set sampler = "poisson", or privacy = "ftrl" with sampler = "round_robin"'
        )
    if adaptive is not None:
        adaptive.sigmas(sigma, exposure)  # refuses a cohort that is too small
    attempt = dp.PoissonSampledDpEvent(exposure.rate, dp.GaussianDpEvent(sigma))
    return dp.SelfComposedDpEvent(attempt, exposure.attempts)


def _release(
    clip: float, sigma: float, adaptive: AdaptiveClip | None, acc: State, memory: State, context: ReleaseContext
) -> tuple[Aggregate, State]:
    """Add noise to the sum, divide by the expected cohort, and adapt the clip."""
    exposure = context.exposure
    attempt, expected = exposure.attempts - 1, exposure.rate * exposure.num_clients
    on_sum, on_count = (sigma, math.inf) if adaptive is None else adaptive.sigmas(sigma, exposure)
    sums = {name: value for name, value in acc.items() if name != f"aux.{BIT}"}
    sums_V = packed(sums)
    noise_V = discrete_gaussian(derived(context.secret, "noise", attempt), on_sum * LEVELS, len(sums_V))
    current = clip if adaptive is None else _adapted_clip(memory)
    scale = current / LEVELS / expected
    aggregate = unpacked(sums_V + noise_V, sums, scale, context.dtype, exposure.cohort)
    if adaptive is None:
        return aggregate, memory
    noise = discrete_gaussian(derived(context.secret, "count", attempt), on_count * LEVELS, 1)
    return aggregate, adaptive.next_clip(current, acc[f"aux.{BIT}"].numpy() + noise, expected)


def _adapted_clip(memory: State) -> float:
    return float(memory["clip"])
