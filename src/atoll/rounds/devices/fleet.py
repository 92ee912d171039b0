"""A fleet of phones."""

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
Sigma = Annotated[float, Range(0, 20)]
"""Of logarithms of speeds: beyond 20 they would leave the range of floats."""


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
    """Draw devices whose speeds are log-normal: medians as given (Mbit/s), `spread` the sigma between devices.

    Each task varies by another log-normal of sigma `jitter`, and is lost with probability `dropout` at some moment of
    its time; 6 to 10 % were lost in Gboard (Bonawitz et al. 2019, arXiv:1902.01046, section 9). With `diurnal` s > 0
    the share of devices that are idle, charging and on an unmetered network swings by a factor of (1 + s) / (1 - s)
    within a day, half of them on average: 0.6 is the factor of 4 seen there.
    """

    @lru_cache(maxsize=1 << 17)
    def speed(client: int) -> Speed:
        compute, down, up = np.exp(spread * generator(seed, "device speed", client).standard_normal(3)).tolist()
        return Speed(samples_per_second * compute, down_mbps * down, up_mbps * up)

    def trips(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
        slower = [math.exp(jitter * z) for z in rng.standard_normal(len(loads))]
        return [trip(load, speed(load.client), dropout, rng, each) for load, each in zip(loads, slower, strict=True)]

    def rested(client: int, seconds: float) -> bool:
        """Whether a device lies on its charger: it is midnight at second 0, and every hour is drawn anew."""
        if not diurnal:
            return True
        share = (1 + diurnal * math.cos(2 * math.pi * seconds / DAY)) / 2
        return bool(generator(seed, "device night", client, int(seconds // 3600)).random() < share)

    def attributes(client: int, seconds: float) -> Mapping[str, float | bool]:
        rests = rested(client, seconds)
        battery, memory = generator(seed, "device", client).random(2).tolist()
        return {
            "idle": rests,
            "charging": rests,
            "unmetered": rests,
            "battery": 1.0 if rests else battery,
            "memory": 1000.0 * 2 ** round(3 * memory),
        }

    return Devices(trips, rested, attributes)
