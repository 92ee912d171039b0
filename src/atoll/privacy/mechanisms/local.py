"""Client-level privacy without a trusted server: each client adds its own noise."""

from __future__ import annotations

from typing import Any

import torch

from atoll.core.messages import Update, stack
from atoll.core.privacy import Exposure, Mechanism, SendContext
from atoll.privacy.grid import CLIENT_DATA, LEVELS, check_noise, noisy_share

ASSUMPTIONS = (
    "nobody is trusted but the client itself: all that leaves it is its clipped update with its own noise",
    "that a client took part, and when, and how many samples it has, is not hidden",
    "the noise is an exact discrete Gaussian on a grid of clip / 2^24, accounted for as the Gaussian of its sigma, "
    "from which it differs by less than the accountant rounds up",
)


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}


def local(clip: float, sigma: float, delta: float, epsilon: float | None = None, test_noise: bool = False) -> Mechanism:
    """Clip the whole update and add Gaussian noise of sigma * clip at the client, before anything leaves it.

    Each sent update is private by itself, so that every aggregator and every algorithm may use it. All weights are 1,
    since a weight would reveal the number of samples. The event is one Gaussian for each time that a client may have
    taken part (Dwork and Roth 2014, appendix A); no amplification is claimed.
    """
    check_noise("local", delta, epsilon, clip=clip, sigma=sigma)

    def event(exposure: Exposure) -> Any:
        import dp_accounting as dp

        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma), exposure.participations)

    def at_client(update: Update, context: SendContext) -> Update:
        rows = []
        for number in range(len(update.weight)):
            row = update.rows(number)
            steps_V = noisy_share(row.vector(), clip, LEVELS, sigma * LEVELS, context.key(number))
            noisy_V = (torch.from_numpy(steps_V).to(torch.float64) * (clip / LEVELS)).to(row.delta_D.dtype)
            rows.append(row.rebuilt(noisy_V)._replace(weight=torch.ones_like(row.weight)))
        return stack(rows)

    return Mechanism(
        unit="client",
        neighbours=CLIENT_DATA,
        delta=delta,
        epsilon=epsilon,
        event=event,
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        clip=clip,
        at_client=at_client,
    )
