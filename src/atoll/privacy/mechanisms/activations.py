"""Privacy of samples' features in split learning: each client adds noise to the activations that it sends."""

from __future__ import annotations

import math
from typing import Any

from atoll.core.privacy import CutNoise, Exposure, Mechanism
from atoll.privacy.grid import check_noise

FEATURES = (
    "one sample with its features replaced by any others, or by what gives no activations (zero-out); its label, and "
    "whose it is, are the same"
)
ASSUMPTIONS = (
    "nobody is trusted but the client itself: what leaves it of a sample's features are clipped activations with its "
    "own noise, and what was computed from these",
    "labels are not protected, nor what layers behind the cut learn of them",
    "the clients' first layers are not trained, and work on each sample by itself",
    "how many samples a client has, and when it takes part, is not hidden",
    "the noise is an exact discrete Gaussian on a grid of clip / 2^24, accounted for as the Gaussian of its sigma, "
    "from which it differs by less than the accountant rounds up",
)


EXAMPLE = {"clip": 1.0, "sigma": 4.0, "delta": 1e-5, "test_noise": True}


def activations(
    clip: float, sigma: float, delta: float, epsilon: float | None = None, test_noise: bool = False
) -> Mechanism:
    """Clip each sample's activations to a norm and add Gaussian noise of sigma * clip at the client.

    Any two samples' activations are within 2 * clip of each other, so that the event is one Gaussian of multiplier
    sigma / 2 for each time that a sample may have been sent (Dwork and Roth 2014, appendix A): in every pass over its
    client's samples, in every attempt in which the client may have taken part. No amplification is claimed.
    """
    check_noise("activations", delta, epsilon, clip=clip, sigma=sigma)

    def event(exposure: Exposure) -> Any:
        import dp_accounting as dp

        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma / 2), exposure.participations * passes(exposure))

    return Mechanism(
        unit="sample",
        neighbours=FEATURES,
        delta=delta,
        epsilon=epsilon,
        event=event,
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        at_cut=CutNoise(clip, sigma),
    )


def passes(exposure: Exposure) -> int:
    """Return how often a task sends a sample at most: once in each pass over its client's samples.

    A pass takes one batch over the rate, rounded up, steps.

    >>> passes(Exposure("uniform", 1.0, 1, sample_rate=0.3, steps=8))
    2
    """
    each = exposure.per_group()
    return max(math.ceil(one.steps / max(1, math.ceil(1 / one.sample_rate - 1e-9))) for one in each)
