"""Devices with random speeds, such as phones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

import numpy as np

from atoll.core.devices import Devices, Load, Speed, Trip, trip
from atoll.core.options import Positive, Range, Seed, ShareBelowOne
from atoll.core.seeds import generator

DAY = 86_400.0
"""Seconds."""
Sigma = Annotated[float, Range(0, 20)]
"""Standard deviation of the logarithm of a speed; above 20 speeds would leave the range of floats."""


def fleet(
    samples_per_second: Positive = 100.0,
    down_mbps: Positive = 20.0,
    up_mbps: Positive = 5.0,
    spread: Sigma = 1.0,
    jitter: Sigma = 0.25,
    dropout: ShareBelowOne = 0.08,
    diurnal: ShareBelowOne = 0.0,
    seed: Seed = 0,
) -> Devices:
    """Draw devices with log-normal speeds of the given medians (links in Mbit/s) and sigma `spread` between devices.

    The time of each task varies by another log-normal of sigma `jitter`. A task is lost with probability `dropout` at a
    uniform moment of its time; 6 to 10 % were lost in Gboard (Bonawitz et al. 2019, arXiv:1902.01046, section 9). With
    `diurnal` s > 0 the share of devices that are idle, charging and on an unmetered network is 1/2 on average and
    varies by a factor of (1 + s) / (1 - s) within a day: 0.6 is the factor of 4 observed there.
    """

    @lru_cache(maxsize=1 << 17)
    def speed(client: int) -> Speed:
        compute, down, up = np.exp(spread * generator(seed, "device speed", client).standard_normal(3)).tolist()
        return Speed(samples_per_second * compute, down_mbps * down, up_mbps * up)

    def trips(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
        factors = [math.exp(jitter * z) for z in rng.standard_normal(len(loads))]
        pairs = zip(loads, factors, strict=True)
        return [trip(load, speed(load.client), dropout, rng, factor) for load, factor in pairs]

    def charging(client: int, seconds: float) -> bool:
        """Tell whether a device is on its charger, drawn anew for every hour; second 0 is midnight."""
        if not diurnal:
            return True
        share = (1 + diurnal * math.cos(2 * math.pi * seconds / DAY)) / 2
        return bool(generator(seed, "device night", client, int(seconds // 3600)).random() < share)

    def attributes(client: int, seconds: float) -> Mapping[str, float | bool]:
        charges = charging(client, seconds)
        battery, memory = generator(seed, "device", client).random(2).tolist()
        return {
            "idle": charges,
            "charging": charges,
            "unmetered": charges,
            "battery": 1.0 if charges else battery,
            "memory": 1000.0 * 2 ** round(3 * memory),
        }

    return Devices(trips, reachable=charging, attributes=attributes)
