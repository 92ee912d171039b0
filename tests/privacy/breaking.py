"""Mechanisms that claim what those of Atoll claim, and do not keep it."""

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
    """Claims sigma, and adds a share of it."""
    return ALL[of](clip, share * sigma, delta)._replace(event=ALL[of](clip, sigma, delta).event)


def no_noise(clip: float, sigma: float, delta: float) -> Mechanism:
    """Claims sigma, and adds next to nothing."""
    return central(clip, 1e-6, delta)._replace(event=central(clip, sigma, delta).event)


def no_clip(clip: float, sigma: float, delta: float) -> Mechanism:
    """Lets updates be a million times as long."""

    def on_grid(update: Update, context: SendContext) -> Update:
        found = bounded(update, 1e6 * clip, LEVELS)
        return found._replace(delta_D=found.delta_D.to(torch.int64) * 1_000_000)

    return central(clip, sigma, delta)._replace(on_grid=on_grid)


def weighted(clip: float, sigma: float, delta: float) -> Mechanism:
    """Counts each client by its number of samples."""

    def on_grid(update: Update, context: SendContext) -> Update:
        found = bounded(update, clip, LEVELS)
        return found._replace(delta_D=found.delta_D.to(torch.int64) * update.weight.to(torch.int64)[:, None])

    return central(clip, sigma, delta)._replace(on_grid=on_grid)
