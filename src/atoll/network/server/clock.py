"""The two clocks of a server, which are passed in so that tests can move them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """What tells the time, and what measures it."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970: for people, and for what must hold over a restart. It may be set at any moment."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds since some moment: for pauses, deadlines and ages. It is never set, and is never written down."""

    def steady(self) -> Callable[[], float]:
        """Return a clock that shows the wall clock's time of now and is not set afterwards."""
        start = self.wall() - self.monotonic()
        return lambda: start + self.monotonic()
