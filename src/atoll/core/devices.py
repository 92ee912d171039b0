"""Devices: how long clients take, whether they come back, and when they can be reached, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Load(NamedTuple):
    """What a task costs a client."""

    client: int
    num_samples: int
    """Samples that it processes, every pass counted."""
    bytes_down: int
    bytes_up: int


class Trip(NamedTuple):
    """What becomes of a task."""

    seconds: float
    """From the request to the answer, or to the moment when the client is lost."""
    fails: bool = False
    work: float = 1.0
    """How much of its steps the client has time for, in (0, 1]."""


class Speed(NamedTuple):
    """How fast a device is."""

    samples_per_second: float
    down_mbps: float
    """Mbit/s."""
    up_mbps: float


def trip(load: Load, speed: Speed, dropout: float, rng: np.random.Generator, factor: float = 1.0) -> Trip:
    """Download, train and upload, `factor` times slower than stated; lost with probability `dropout` on the way."""
    megabits = 8e-6 * load.bytes_down / speed.down_mbps + 8e-6 * load.bytes_up / speed.up_mbps
    seconds = factor * (megabits + load.num_samples / speed.samples_per_second)
    fails, when = rng.random() < dropout, rng.random()
    return Trip(seconds * when if fails else seconds, fails)


def always(client: int, seconds: float) -> bool:
    """At any time."""
    return True


def unknown(client: int, seconds: float) -> Mapping[str, float | bool]:
    """Nothing is known of a device."""
    return {}


class Devices(NamedTuple):
    """A population of devices; functions of the client, the simulated seconds and the generator alone."""

    trips: Callable[[list[Load], np.random.Generator], list[Trip]]
    """What becomes of tasks that were sent together."""
    reachable: Callable[[int, float], bool] = always
    attributes: Callable[[int, float], Mapping[str, float | bool]] = unknown
    """Battery, memory and so on, for rules on who may take part."""


def at_once(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
    """Answer without delay."""
    return [Trip(0.0) for _ in loads]


INSTANT = Devices(at_once)
"""Devices that take no time, for plans that say nothing about them."""
