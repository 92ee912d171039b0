"""Devices: duration and loss of tasks, and reachability of clients, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Load(NamedTuple):
    """The work of a task."""

    client: int
    num_samples: int
    """Number of samples processed, counted in every epoch."""
    bytes_down: int
    bytes_up: int


class Trip(NamedTuple):
    """The outcome of a task."""

    seconds: float
    """Simulated seconds from the request to the answer, or to the loss of the client."""
    fails: bool = False
    work: float = 1.0
    """Share of its steps that the client has time for, in (0, 1]."""


class Speed(NamedTuple):
    """The speed of a device."""

    samples_per_second: float
    down_mbps: float
    """Mbit/s."""
    up_mbps: float
    """Mbit/s."""


def trip(load: Load, speed: Speed, dropout: float, rng: np.random.Generator, factor: float = 1.0) -> Trip:
    """Return the outcome of download, training and upload.

    The time is `factor` times that of `speed`; with probability `dropout` the task is lost at a uniform moment of it.
    """
    transfer = 8e-6 * load.bytes_down / speed.down_mbps + 8e-6 * load.bytes_up / speed.up_mbps
    seconds = factor * (transfer + load.num_samples / speed.samples_per_second)
    fails, moment = rng.random() < dropout, rng.random()
    return Trip(seconds * moment if fails else seconds, fails)


def always(client: int, seconds: float) -> bool:
    """Return True: the device can be reached at any time."""
    return True


def unknown(client: int, seconds: float) -> Mapping[str, float | bool]:
    """Return no attributes."""
    return {}


class Devices(NamedTuple):
    """A population of devices, as pure functions of the client, the simulated seconds and the generator."""

    trips: Callable[[list[Load], np.random.Generator], list[Trip]]
    """(tasks sent together, generator) -> their outcomes."""
    reachable: Callable[[int, float], bool] = always
    """(client, simulated seconds) -> whether it can be reached."""
    attributes: Callable[[int, float], Mapping[str, float | bool]] = unknown
    """(client, simulated seconds) -> attributes such as battery and memory, for the eligibility rule."""


def at_once(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
    """Return outcomes that take no time."""
    return [Trip(0.0) for _ in loads]


INSTANT = Devices(at_once)
"""Devices that take no time, for plans without devices."""
