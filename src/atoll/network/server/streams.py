"""The server's ends of sessions inside tasks: for each client a stream of messages up and one down.

Requests put parts of messages in and wait for parts of answers; a run's own thread takes whole messages, in order, and
sends. Messages lie in files without a name, which vanish with the process: what a session needs of memory does not grow
with what is exchanged. The whole stream down is kept until the session ends, for a client that was killed.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, final

from atoll.network.protocol.exchange import NONE, SESSION_BYTES, SessionEnd, SessionPart, Transcript, num_parts
from atoll.network.protocol.objects import CHUNK
from atoll.network.server.auth import Refused

OVER = "this session is over: poll for work"


class StreamLimits(NamedTuple):
    """What one client may send in a session."""

    max_bytes: int
    """Bytes of the longest message."""
    window: int
    """Messages that it may be ahead of what the run has taken."""


class Place(NamedTuple):
    """Where a message or a part of one lies in a file."""

    start: int
    size: int


class Spool:
    """Bytes in a file without a name."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._end = 0

    def append(self, data: bytes) -> Place:
        """Append bytes; return where they are. Not for two threads at once."""
        place, view = Place(self._end, len(data)), memoryview(data)
        while view:
            view = view[os.pwrite(self._file.fileno(), view, place.start + len(data) - len(view)) :]
        self._end += len(data)
        return place

    def read(self, place: Place) -> bytes:
        """Read bytes back."""
        return os.pread(self._file.fileno(), place.size, place.start)

    def clear(self) -> None:
        """Give the room back."""
        self._file.truncate(0)
        self._end = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class Taken(NamedTuple):
    """A whole message of a client."""

    cause: int
    """Number of the message down that it answers, as the client says."""
    data: bytes


@final
class Stream:
    """One client's session; `changed` is notified of all that happens."""

    def __init__(self, client: int, limits: StreamLimits, directory: Path, changed: threading.Condition) -> None:
        self.client, self.session = client, secrets.token_hex(SESSION_BYTES)
        self.transcript = Transcript()
        self.end: SessionEnd | None = None
        """What the client said at its end."""
        self._limits, self._changed = limits, changed
        self._up, self._down = Spool(directory), Spool(directory)
        self._parts: dict[int, dict[int, Place]] = {}
        """Number of a message -> its parts that are here, of messages that are not whole, or not due."""
        self._sizes: dict[int, tuple[int, int]] = {}
        """Number of such a message -> how many parts it has, and its cause."""
        self._whole: deque[tuple[int, list[Place]]] = deque()
        """Cause and parts of the messages that are due, in order."""
        self._num_whole = self._num_taken = 0
        self._sent: list[Place] = []
        self._waiting: list[Callable[[], None]] = []
        self._why_closed = ""

    @property
    def num_whole(self) -> int:
        """Return how many messages are here, one after another from the first."""
        return self._num_whole

    @property
    def is_ready(self) -> bool:
        """Return whether a message waits to be taken."""
        return bool(self._whole)

    def put(self, told: SessionPart, data: bytes) -> None:
        """Take a part of a message; one that is here already changes nothing."""
        if told.number == NONE:
            return
        with self._changed:
            self._must_be_open()
            if told.number < self._num_whole or told.part in self._parts.get(told.number, {}):
                return
            self._must_fit(told, data)
            self._sizes.setdefault(told.number, (told.parts, told.cause))
            self._parts.setdefault(told.number, {})[told.part] = self._up.append(data)
            while self._next_is_whole():
                number = self._num_whole
                _, cause = self._sizes.pop(number)
                places = [place for _, place in sorted(self._parts.pop(number).items())]
                self._whole.append((cause, places))
                self._num_whole += 1
                self.transcript.add("up", self._read(places))
            self._changed.notify_all()

    def take(self) -> Taken | None:
        """Take the next whole message; None if it is not here."""
        with self._changed:
            if not self._whole or self._why_closed:
                return None
            cause, places = self._whole.popleft()
            data = self._read(places)
            self._num_taken += 1
            if not self._whole and not self._parts:
                self._up.clear()
            return Taken(cause, data)

    def send(self, data: bytes) -> int:
        """Send the next message; return its number."""
        with self._changed:
            self._sent.append(self._down.append(data))
            self.transcript.add("down", data)
            self._wake()
            return len(self._sent) - 1

    def part(self, number: int, part: int) -> tuple[int, bytes] | None:
        """Return how many parts a message down has, and one of them, empty if it has fewer; None if it is not there."""
        with self._changed:
            self._must_be_open()
            if number >= len(self._sent):
                return None
            whole = self._sent[number]
            start = min(part * CHUNK, whole.size)
            place = Place(whole.start + start, min(CHUNK, whole.size - start))
            return num_parts(whole.size), self._down.read(place)

    def when_news(self, call: Callable[[], None]) -> Callable[[], None]:
        """Let a function be called whenever there is something to hear; return one that ends this."""
        with self._changed:
            self._waiting.append(call)

        def forget() -> None:
            with self._changed:
                self._waiting.remove(call)

        return forget

    def finish(self, end: SessionEnd) -> None:
        """Note what the client says at its end; the first word counts."""
        with self._changed:
            self._must_be_open()
            self.end = self.end or end
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """End the session: whoever waits hears why, and files are removed."""
        with self._changed:
            if not self._why_closed:
                self._why_closed = why
                self._up.close()
                self._down.close()
                self._wake()

    def _wake(self) -> None:
        for call in self._waiting:
            call()

    def _must_be_open(self) -> None:
        if self._why_closed:
            raise Refused(HTTPStatus.GONE, self._why_closed)

    def _must_fit(self, told: SessionPart, data: bytes) -> None:
        """Refuse a part that no message of this session can have."""
        last = told.part == told.parts - 1
        most = num_parts(self._limits.max_bytes)
        if not told.part < told.parts <= most:
            raise _unfit(f"part {told.part} of {told.parts}: a message has at most {most} parts")
        if (len(data) != CHUNK and not last) or told.part * CHUNK + len(data) > self._limits.max_bytes:
            most_bytes = self._limits.max_bytes
            raise _unfit(
                f"a part of {len(data)} bytes: all but the last have {CHUNK:,}, a message at most {most_bytes:,}"
            )
        if told.number >= self._num_taken + self._limits.window:
            raise _unfit(f"message {told.number}, {self._num_taken} were taken: wait for answers")
        if self._sizes.get(told.number, (told.parts, told.cause)) != (told.parts, told.cause):
            raise _unfit(f"message {told.number} was said to have other parts: send the same again")
        if told.cause >= max(1, len(self._sent)):
            raise _unfit(f"an answer to message {told.cause}, which was not sent")

    def _next_is_whole(self) -> bool:
        number = self._num_whole
        return number in self._sizes and len(self._parts[number]) == self._sizes[number][0]

    def _read(self, places: Iterable[Place]) -> bytes:
        return b"".join(map(self._up.read, places))


@final
class Streams:
    """The open sessions of one run; used from several threads."""

    def __init__(self, directory: Path, wake: Callable[[set[int]], None]) -> None:
        self._directory, self._wake = directory, wake
        self._changed = threading.Condition()
        self._open: dict[int, Stream] = {}

    def open(self, client: int, limits: StreamLimits) -> Stream:
        """Open a session for a client, whose next poll names it."""
        stream = Stream(client, limits, self._directory, self._changed)
        with self._changed:
            before, self._open[client] = self._open.get(client), stream
        if before is not None:
            before.close(OVER)
        self._wake({client})
        return stream

    def of(self, client: int) -> Stream | None:
        """Return the open session of a client."""
        with self._changed:
            return self._open.get(client)

    def close(self, stream: Stream, why: str = OVER) -> None:
        """End a session."""
        with self._changed:
            if self._open.get(stream.client) is stream:
                del self._open[stream.client]
        stream.close(why)

    def close_all(self) -> None:
        """End all sessions."""
        with self._changed:
            streams = list(self._open.values())
        for stream in streams:
            self.close(stream)

    def wait(self, streams: Iterable[Stream], seconds: float) -> None:
        """Wait until one of some sessions has a message or has ended, or the time is up."""
        wanted = list(streams)
        with self._changed:
            self._changed.wait_for(lambda: any(each.is_ready or each.end is not None for each in wanted), seconds)

    def __iter__(self) -> Iterator[Stream]:
        with self._changed:
            return iter(list(self._open.values()))


def _unfit(why: str) -> Refused:
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"this is not due in the session: {why}")
