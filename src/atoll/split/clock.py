"""Simulated seconds of messages. Each client has a link of its own; computing takes no time.

A message of b bytes keeps one direction of the link busy for b / bandwidth seconds and arrives latency / 2 seconds
later; both directions work at once. What is answered leaves when its cause has arrived, so that several messages on
their way share one round trip. A second clock on which a round trip takes 1 and bytes nothing counts the round trips
that follow one upon another.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

from atoll.core.split import Split


class Moment(NamedTuple):
    """A time in simulated seconds, and in round trips."""

    seconds: float = 0.0
    trips: float = 0.0

    def later(self, other: Moment) -> Moment:
        """Return the later of both, on each clock."""
        return Moment(max(self.seconds, other.seconds), max(self.trips, other.trips))


@final
class Link:
    """A client's link to the server, each way with a bandwidth of its own."""

    def __init__(self, bandwidth: float | None, latency: float | None, now: Moment) -> None:
        self._rate, self._delay = bandwidth or math.inf, (latency or 0.0) / 2
        self._free = {"up": now.seconds, "down": now.seconds}

    @classmethod
    def of(cls, split: Split, now: Moment) -> Link:
        """Return a link as a plan says, idle since a moment."""
        return cls(split.bandwidth, split.latency, now)

    def send(self, way: str, num_bytes: int, ready: Moment) -> Moment:
        """Return when a message arrives that was ready at a moment; `way` is "up" or "down"."""
        self._free[way] = max(self._free[way], ready.seconds) + num_bytes / self._rate
        return Moment(self._free[way] + self._delay, ready.trips + 0.5)
