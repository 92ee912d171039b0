"""Client-level privacy with a trusted server: DP-FedAvg."""

from __future__ import annotations

import math
from typing import Any

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


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "quantile": 0.5}


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
    that quantile of the updates' norms (Andrew et al. 2021, arXiv:1905.03871, algorithm 1), and `clip` is its first
    value: the number of updates within the clip is released with noise `bit_sigma` (by default expected cohort / 20),
    and the noise on the sum grows so that both together cost what `sigma` alone would:
    z_delta = (sigma^-2 - (2 bit_sigma)^-2)^(-1/2).
    """
    check_noise("central", delta, epsilon, clip=clip, sigma=sigma)
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

    def event(exposure: Exposure) -> Any:
        import dp_accounting as dp

        if exposure.scheme != "poisson":
            raise PlanError(
                "central privacy is accounted for clients that are drawn by independent coins, but here they are "
                f'drawn {exposure.scheme}: set sampler = "poisson", or privacy = "ftrl" with sampler = "round_robin"'
            )
        sigmas(exposure)
        round_event = dp.PoissonSampledDpEvent(exposure.rate, dp.GaussianDpEvent(sigma))
        return dp.SelfComposedDpEvent(round_event, exposure.attempts)

    def sigmas(exposure: Exposure) -> tuple[float, float]:
        """Return the noise on the sum, in clips, and the noise on the count, in clients."""
        if quantile is None:
            return sigma, math.inf
        on_count = exposure.cohort / 20 if bit_sigma is None else bit_sigma
        if not on_count > sigma / 2:
            raise PlanError(
                f"central: with {exposure.cohort} clients a round, the count of an adaptive clip would use the whole "
                f"privacy budget: set privacy.bit_sigma above sigma / 2 = {sigma / 2}, or ask more clients"
            )
        return (sigma**-2 - (2 * on_count) ** -2) ** -0.5, on_count

    def on_grid(update: Update, context: SendContext) -> Update:
        clipped = bounded(update, context.clip, LEVELS, context.spec if per_layer else None)
        if quantile is None:
            return clipped
        length_C = lengths(update)
        bit_C = torch.where(length_C <= context.clip, LEVELS // 2, -LEVELS // 2)  # sensitivity 1/2, as in the paper
        bit_C[~length_C.isfinite()] = 0
        return clipped._replace(aux={**clipped.aux, BIT: bit_C[:, None]})

    def release(acc: State, memory: State, context: ReleaseContext) -> tuple[Aggregate, State]:
        exposure = context.exposure
        attempt = exposure.attempts - 1
        on_sum, on_count = sigmas(exposure)
        sums = {name: value for name, value in acc.items() if name != f"aux.{BIT}"}
        sums_V = packed(sums)
        noise_V = discrete_gaussian(derived(context.secret, "noise", attempt), on_sum * LEVELS, len(sums_V))
        expected = exposure.rate * exposure.num_clients
        current = clip if quantile is None else clip_of(memory)
        scale = current / LEVELS / expected
        aggregate = unpacked(sums_V + noise_V, sums, scale, context.dtype, exposure.cohort)
        if quantile is None:
            return aggregate, memory
        count = acc[f"aux.{BIT}"].numpy() + discrete_gaussian(
            derived(context.secret, "count", attempt), on_count * LEVELS, 1
        )
        within = min(1.0, max(0.0, float(count[0]) / LEVELS / expected + 0.5))
        adapted = current * math.exp(-clip_lr * (within - quantile))
        return aggregate, {"clip": torch.tensor(adapted, dtype=torch.float64)}

    def clip_of(memory: State) -> float:
        return float(memory["clip"])

    return Mechanism(
        unit="client",
        neighbours="one client with all its samples, or nobody in its place (zero-out): how many clients there are is "
        "the same, and no secret",
        delta=delta,
        epsilon=epsilon,
        event=event,
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        clip=clip,
        init=(lambda: {}) if quantile is None else (lambda: {"clip": torch.tensor(clip, dtype=torch.float64)}),
        clip_of=None if quantile is None else clip_of,
        on_grid=on_grid,
        release=release,
        hides_cohort=True,
        min_reports=lambda cohort: 0,  # an empty cohort releases noise too, since a missing release would reveal it
    )
