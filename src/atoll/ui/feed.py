"""What changes in runs, found out once for all pages and streamed to each as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from atoll.ui.rows import MAX_ROWS, RowLog, measures_of
from atoll.ui.run_files import Json
from atoll.ui.runs import RunsDirectory

POLL_SECONDS = 0.3
"""Seconds between two looks at the followed runs."""
SCAN_SHARE = 0.05
"""Share of the time that looking at all runs may take."""
CLIENTS_SECONDS = 1.0
"""Seconds between two looks at the clients of a federation."""
OVERLAP = 50
"""Rounds that are sent again to a page that comes back: a round that it knows may say more by now."""
MAX_WAITING = 200
"""Messages that may wait for a slow page; then its stream ends, and it comes back when it can."""
CHECK_SECONDS, KEEP_ALIVE_SECONDS = 1.0, 10.0
"""Seconds between two looks at a page's session, and until something is sent to a page with no news."""


class Subscription:
    """One page: the runs that it follows, how far it has got, and the messages that wait for it."""

    def __init__(self, follow: Sequence[str], last: Mapping[str, int]) -> None:
        self.follow, self.last = tuple(dict.fromkeys(follow)), dict(last)
        self.logs: dict[str, tuple[RowLog, int]] = {}
        """Log of each followed run, and how many of its rows were sent."""
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        self.is_new = True

    def put(self, event: str, data: bytes) -> None:
        """Queue a message; a page that is too slow loses its stream and asks again."""
        marker = urlencode({run: self.last[run] for run in self.follow if run in self.last})
        try:
            self.queue.put_nowait(b"event: %s\nid: %s\ndata: %s\n\n" % (event.encode(), marker.encode(), data))
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End the stream after what is on its way."""
        while True:
            try:
                self.queue.put_nowait(None)
                return
            except asyncio.QueueFull:
                with contextlib.suppress(asyncio.QueueEmpty):
                    self.queue.get_nowait()


def read_marker(text: str) -> dict[str, int]:
    """Return the rounds that a page had, by run, from the id of the last message that it received.

    >>> read_marker("demo-1=12&sweep%2F0=3&x=y")
    {'demo-1': 12, 'sweep/0': 3}
    """
    return {run: int(number) for run, number in parse_qsl(text) if number.isascii() and number.isdigit()}


class Feed:
    """Looks for changes while pages are open; for one event loop."""

    def __init__(self, runs: RunsDirectory, clients: Callable[[], list[Json] | None]) -> None:
        self._runs, self._clients = runs, clients
        self._pages: set[Subscription] = set()
        self._summaries: dict[str, Json] = {}
        self._stamps: dict[str, dict[str, object]] = {}
        self._clients_seen: object = None
        self._clients_read: tuple[float, bytes | None] = (-math.inf, None)
        self._clients_lock = threading.Lock()
        self._next_scan = self._next_clients = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for page in self._pages:
            page.end()

    async def messages(self, page: Subscription, alive: Callable[[], str]) -> AsyncIterator[bytes]:
        """Yield the messages of a page until it leaves; `alive` returns why its session has ended, or ""."""
        self._pages.add(page)
        if self._closed:
            page.end()
        if self._task is None:
            self._task = asyncio.create_task(self._poll())
            self._task.add_done_callback(lambda _: setattr(self, "_task", None))
        said = checked = time.monotonic()
        try:
            while True:
                message: bytes | None = b""
                with contextlib.suppress(TimeoutError):
                    message = await asyncio.wait_for(page.queue.get(), CHECK_SECONDS)
                if time.monotonic() - checked >= CHECK_SECONDS:
                    checked = time.monotonic()
                    why = await asyncio.to_thread(alive)
                    if why:
                        yield b"event: bye\ndata: %s\n\n" % _encoded({"why": why})
                        return
                if message is None:
                    return
                if not message and time.monotonic() - said >= KEEP_ALIVE_SECONDS:
                    message = b": still here\n\n"
                if message:
                    said = time.monotonic()
                    yield message
        finally:
            self._pages.discard(page)

    async def _poll(self) -> None:
        """Look for changes as long as there are pages."""
        while self._pages and not self._closed:
            pages = list(self._pages)
            followed = {run for page in pages for run in page.follow}
            found = await asyncio.to_thread(self._look, followed)
            for page in pages:
                self._tell(page, *found)
            await asyncio.sleep(POLL_SECONDS)
        self._summaries, self._stamps, self._next_scan = {}, {}, 0.0
        self._runs.forget_rows(self._runs.followed())

    def _look(self, followed: set[str]) -> tuple[dict[str, Json], list[str], dict[str, list[str]], bool]:
        """Return changed summaries, runs that are gone, changed files of followed runs, and whether clients changed."""
        now, before = time.monotonic(), self._summaries
        changed: dict[str, Json] = {}
        gone: list[str] = []
        if now >= self._next_scan:
            self._summaries = self._runs.summaries()
            changed = {run: each for run, each in self._summaries.items() if before.get(run) != each}
            gone = [run for run in before if run not in self._summaries]
            self._next_scan = now + (time.monotonic() - now) / SCAN_SHARE
        files: dict[str, list[str]] = {}
        for run in followed & self._summaries.keys():
            with contextlib.suppress(OSError):
                stamps = self._runs.stamps(run)
                old = self._stamps.get(run)
                names = [name for name, stamp in stamps.items() if old is not None and old.get(name) != stamp]
                files |= {run: names} if names else {}
                self._stamps[run] = stamps
                self._runs.rows(run)
        self._runs.forget_rows(self._runs.followed().keys() - followed)
        return changed, gone, files, self._clients_changed(now)

    def _clients_changed(self, now: float) -> bool:
        if now < self._next_clients:
            return False
        self._next_clients = now + CLIENTS_SECONDS
        known = self._clients()
        self._clients_read = now, None if known is None else _encoded({"clients": known})
        seen = known and [{key: value for key, value in each.items() if key != "seconds_since"} for each in known]
        changed, self._clients_seen = seen != self._clients_seen, seen
        return changed

    def forget_clients(self) -> None:
        """Read the clients anew when they are next asked for, since somebody has changed them."""
        self._clients_read, self._next_clients = (-math.inf, None), 0.0

    def clients(self) -> bytes | None:
        """Return the clients as JSON, read at most once a second for all pages; None without a federation."""
        with self._clients_lock:
            if time.monotonic() - self._clients_read[0] > CLIENTS_SECONDS:
                known = self._clients()
                self._clients_read = time.monotonic(), None if known is None else _encoded({"clients": known})
            return self._clients_read[1]

    def _tell(
        self, page: Subscription, changed: dict[str, Json], gone: list[str], files: dict[str, list[str]], clients: bool
    ) -> None:
        if page.is_new:
            changed, page.is_new = self._summaries, False
        for run in page.follow:
            if run in self._summaries:
                self._tell_rows(page, run)
            if run in files:
                page.put("files", _encoded({"id": run, "names": files[run]}))
        if changed:  # after the rows: a run that has ended has no more
            page.put("runs", _encoded({"runs": list(changed.values())}))
        if gone:
            page.put("gone", _encoded({"ids": gone}))
        if clients:
            page.put("clients", b'{"changed":true}')

    def _tell_rows(self, page: Subscription, run: str) -> None:
        """Send the rows of a run that a page lacks, or has otherwise."""
        log = self._runs.followed().get(run)
        if log is None:
            return
        known = page.logs.get(run)
        if known is None:
            start = bisect_right(log.rounds, page.last.get(run, 0) - OVERLAP)
        elif known[0] is log:
            start = known[1]
        else:
            start = next(
                (
                    n
                    for n, (old, new) in enumerate(zip(known[0].lines[: known[1]], log.lines, strict=False))
                    if old != new
                ),
                min(known[1], len(log.lines)),
            )
        places, _ = log.chosen(MAX_ROWS, start)
        is_same = known is not None and known[0] is log and not places
        page.logs[run] = (log, places[-1] + 1 if places else start)
        if is_same:
            return
        page.last[run] = log.rounds[places[-1]] if places else 0
        head = {"id": run, "keep": log.rounds[start - 1] if start else 0, "measures": measures_of(log.names)}
        rows = b",".join(log.lines[place] for place in places)
        page.put("rows", _encoded(head)[:-1] + b',"rows":[' + rows + b"]}")


def _encoded(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=str).encode()
