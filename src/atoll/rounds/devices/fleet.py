"""A fleet of phones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from atoll.core.devices import Devices, Load, Speed, Trip, trip
from atoll.core.errors import PlanError
from atoll.core.seeds import generator

DAY = 86_400.0
SHARES = ("dropout", "diurnal")


def fleet(
    samples_per_second: float = 100.0,
    down_mbps: float = 20.0,
    up_mbps: float = 5.0,
    spread: float = 1.0,
    jitter: float = 0.25,
    dropout: float = 0.08,
    diurnal: float = 0.0,
    seed: int = 0,
) -> Devices:
    """Draw devices whose speeds are log-normal: medians as given (Mbit/s), `spread` the sigma between devices.

    Each task varies by another log-normal of sigma `jitter`, and is lost with probability `dropout` at some moment of
    its time; 6 to 10 % were lost in Gboard (Bonawitz et al. 2019, arXiv:1902.01046, section 9). With `diurnal` s > 0
    the share of devices that are idle, charging and on an unmetered network swings by a factor of (1 + s) / (1 - s)
    within a day, half of them on average: 0.6 is the factor of 4 seen there.
    """
    for name, value in (("samples_per_second", samples_per_second), ("down_mbps", down_mbps), ("up_mbps", up_mbps)):
        if not value > 0:
            raise PlanError(f"fleet: {name} must be above 0, got {value}")
    for name, value in (("spread", spread), ("jitter", jitter)):
        if value < 0:
            raise PlanError(f"fleet: {name} must be 0 or more, got {value}")
    for name, value in zip(SHARES, (dropout, diurnal), strict=True):
        if not 0 <= value < 1:
            raise PlanError(f"fleet: {name} must be in [0, 1), got {value}")

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
