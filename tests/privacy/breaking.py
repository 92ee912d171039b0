"""Mechanisms that violate their claims."""

from __future__ import annotations

import torch

from atoll.core.messages import Update
from atoll.core.privacy import Mechanism, SendContext
from atoll.privacy.grid import LEVELS, bounded
from atoll.privacy.mechanisms.central import central
from atoll.privacy.mechanisms.distributed import distributed
from atoll.privacy.mechanisms.ftrl import ftrl
from atoll.privacy.mechanisms.local import local
from atoll.privacy.mechanisms.sample import sample

ALL = {"central": central, "distributed": distributed, "ftrl": ftrl, "local": local, "sample": sample}


def less_noise(of: str, share: float, clip: float, sigma: float, delta: float) -> Mechanism:
    """Claim sigma, and add a share of it."""
    return ALL[of](clip, share * sigma, delta)._replace(event=ALL[of](clip, sigma, delta).event)


def no_noise(clip: float, sigma: float, delta: float) -> Mechanism:
    """Claim sigma, and add almost no noise."""
    return central(clip, 1e-6, delta)._replace(event=central(clip, sigma, delta).event)


def no_clip(clip: float, sigma: float, delta: float) -> Mechanism:
    """Allow updates of a million times the clip."""

    def on_grid(update: Update, context: SendContext) -> Update:
        clipped = bounded(update, 1e6 * clip, LEVELS)
        return clipped._replace(delta_D=clipped.delta_D.to(torch.int64) * 1_000_000)

    return central(clip, sigma, delta)._replace(on_grid=on_grid)


def weighted(clip: float, sigma: float, delta: float) -> Mechanism:
    """Weight each client by its number of samples."""

    def on_grid(update: Update, context: SendContext) -> Update:
        clipped = bounded(update, clip, LEVELS)
        return clipped._replace(delta_D=clipped.delta_D.to(torch.int64) * update.weight.to(torch.int64)[:, None])

    return central(clip, sigma, delta)._replace(on_grid=on_grid)
