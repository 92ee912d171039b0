"""The clocks of a server, passed in so that tests can move them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """A wall clock and a monotonic clock."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970: for display, and for times that outlive a restart. It may be set at any moment."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds since some moment: for pauses, deadlines and ages. It is never set, and never stored."""

    def steady(self) -> Callable[[], float]:
        """Return a clock that starts at the wall clock's time and is never set."""
        start = self.wall() - self.monotonic()
        return lambda: start + self.monotonic()
