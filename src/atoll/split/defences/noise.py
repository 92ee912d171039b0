"""Noise on activations, without a claim."""

from __future__ import annotations

from typing import Annotated

from atoll.core.defence import Defence
from atoll.core.options import above
from atoll.core.privacy import CutNoise
from atoll.split.shield import clipped_noise

EXAMPLE = {"clip": 1.0, "sigma": 0.5, "test_noise": True}


def noise(
    clip: Annotated[float, above(0, "a norm of activations, e.g. their usual one")],
    sigma: Annotated[float, above(0, "leave noise out for none")],
    test_noise: bool = False,
) -> Defence:
    """Clip each sample's activations to a norm, and add Gaussian noise of sigma * clip to each value, at the client.

    The draws are those of privacy mechanisms. No epsilon is claimed: labels, or layers that were trained on samples
    without noise, leave the client too. `privacy = "activations"` is the same noise where a claim can be made.
    """
    return clipped_noise(CutNoise(clip, sigma))._replace(test_noise=test_noise)
