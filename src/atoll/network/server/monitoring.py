"""Events of a server as lines of JSON on standard error, and its counters for Prometheus.

Lines hold names of clients and runs, numbers and reasons; never keys, tokens, signatures, updates or data. Counters
name no client.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

Event = Literal[
    "started",
    "session",
    "asked",
    "rejected",
    "committed",
    "abandoned",
    "waiting",
    "cut",
    "unmeasured",
    "evaluating",
    "added",
    "evaluated",
    "checked",
    "ended",
    "read_only",
    "recovered",
    "stopping",
]
QUIET_SECONDS = 60.0
"""Seconds between two lines of one kind of trouble."""
MAX_TEXT = 300
"""Maximum length of a text: what others send is cut."""
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Bounds of the histogram of commit times."""
WORD = re.compile(r"[a-z][a-z ]{0,39}")


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


class Metrics:
    """Counters in a registry of their own; methods may be called from any thread."""

    content_type = CONTENT_TYPE
    """The content type of `text`."""

    def __init__(self) -> None:
        self._registry = of = CollectorRegistry()
        ProcessCollector(registry=of)  # memory, processor time, open files
        self._requests = Counter("atoll_requests", "Requests answered.", ["endpoint", "status"], registry=of)
        self._bytes_in = Counter("atoll_received_bytes", "Bytes of requests' bodies.", registry=of)
        self._bytes_out = Counter("atoll_sent_bytes", "Bytes of answers' bodies.", registry=of)
        self._updates = Counter("atoll_updates", "Updates by what became of them.", ["outcome", "reason"], registry=of)
        self._commits = Histogram(
            "atoll_commit_seconds", "Seconds that a commit took.", ["run"], buckets=SECONDS, registry=of
        )
        self._abandoned = Counter("atoll_abandoned", "Attempts of which nothing was made.", ["run"], registry=of)
        self._round = Gauge("atoll_round", "The version of the model.", ["run"], registry=of)
        self._online = Gauge("atoll_clients_online", "Clients that were heard of a moment ago.", registry=of)
        self._waiting = Gauge("atoll_polls_waiting", "Clients that wait for work.", registry=of)
        self._read_only = Gauge(
            "atoll_read_only", "1 while nothing can be written, such as on a full disk.", registry=of
        )

    def request(self, endpoint: str, status: int, received: int, sent: int) -> None:
        """Count a request; `endpoint` is the path with {parameters}, never with a client's values."""
        self._requests.labels(endpoint, str(int(status))).inc()
        self._bytes_in.inc(received)
        self._bytes_out.inc(sent)

    def arrived(self) -> None:
        """Count an update that was stored."""
        self._updates.labels("arrived", "").inc()

    def late(self) -> None:
        """Count an update that came too late."""
        self._updates.labels("late", "").inc()

    def rejected(self, reason: str) -> None:
        """Count a rejected update; `reason` is a few plain words, such as "not finite"."""
        self._updates.labels("rejected", reason if WORD.fullmatch(reason) else "other").inc()

    def committed(self, run: str, version: int, seconds: float) -> None:
        """Count a commit, and set the version that it made."""
        self._commits.labels(run).observe(seconds)
        self.at_round(run, version)

    def at_round(self, run: str, version: int) -> None:
        """Set the version of a run, such as after a restart."""
        self._round.labels(run).set(version)

    def abandoned(self, run: str) -> None:
        """Count an abandoned attempt."""
        self._abandoned.labels(run).inc()

    def online(self, num: int) -> None:
        """Set the number of clients that are online."""
        self._online.set(num)

    def waiting(self) -> AbstractContextManager[object]:
        """Count a poll as waiting while the block runs."""
        return self._waiting.track_inprogress()

    def read_only(self, yes: bool) -> None:
        """Set whether the server cannot write."""
        self._read_only.set(yes)

    def text(self) -> bytes:
        """Return all counters in the format of Prometheus."""
        return generate_latest(self._registry)
