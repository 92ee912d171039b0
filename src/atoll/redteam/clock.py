"""The time that a red team has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[str], None]


class Clock(NamedTuple):
    """The time that a red team has."""

    began: float
    """When shares of the time begin: when the first rounds have been watched."""
    ends: float
    progress: Progress
    now: Callable[[], float]

    def left(self, until: float = 1.0) -> float:
        """Return the seconds until a share of the time is over."""
        return self.began + until * (self.ends - self.began) - self.now()

    def over_in(self, seconds: float) -> Callable[[], bool]:
        """Return a function that says whether so many seconds from now are over."""
        until = self.now() + seconds
        return lambda: self.now() > until

    def say(self, what: str) -> None:
        """Tell what is tried, and how much time is left."""
        self.progress(f"{max(0.0, self.left()):4.0f} s left   {what}")
