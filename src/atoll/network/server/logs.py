"""Events of a server as lines of JSON on standard error.

Lines hold names of clients and runs, numbers and reasons; never keys, tokens, signatures, updates or data.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Literal

Event = Literal[
    "started",
    "session",
    "asked",
    "rejected",
    "committed",
    "abandoned",
    "waiting",
    "cut",
    "ended",
    "read_only",
    "recovered",
    "stopping",
]
QUIET_SECONDS = 60.0
"""Seconds between two lines of one kind of trouble."""
MAX_TEXT = 300
"""Maximum length of a text: what others send is cut."""


def log(event: Event, **fields: str | int | float | None) -> None:
    """Write a line with `time`, `event` and fields; ignore a failure to write it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": event, **{name: _short(value) for name, value in fields.items()}})
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class RateLimitedLog:
    """Logs at most one line in a period, with the number of lines that were left out."""

    def __init__(self, seconds: float = QUIET_SECONDS, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now, self._next, self._silent = seconds, now, 0.0, 0

    def write(self, why: str) -> None:
        """Write a line, unless one was written in this period."""
        if self._now() < self._next:
            self._silent += 1
            return
        more = f" (and {self._silent} times since this was last said)" if self._silent else ""
        self._next, self._silent = self._now() + self._seconds, 0
        log("rejected", why=why + more)


class _LogHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._kinds: dict[str, RateLimitedLog] = {}

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = record.getMessage().strip() + ("" if error is None else f": {type(error).__name__}: {error}")
        self._kinds.setdefault(type(error).__name__, RateLimitedLog()).write(
            why
        )  # strangers may cause errors at any rate


def log_errors_of(library: str) -> None:
    """Log errors of a library as lines too; not its warnings, which strangers can cause."""
    logger = logging.getLogger(library)
    logger.handlers, logger.propagate = [_LogHandler()], False


def _short(value: str | int | float | None) -> str | int | float | None:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "..."
    return None if isinstance(value, float) and not math.isfinite(value) else value
