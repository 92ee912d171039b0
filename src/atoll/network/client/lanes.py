"""A client's end of a session: messages up and down over several requests at once.

A request with a part of a message up waits for a part of the next message down, so that as many round trips overlap as
messages are on their way. What the server has already is not sent again: a client that was killed makes its messages
anew, and only hears those of the server.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import NamedTuple, Self, final

import msgspec

from atoll.network.client.connection import LANES, Connection
from atoll.network.protocol import endpoints
from atoll.network.protocol.exchange import NONE, Parcel, SessionPart, Transcript, num_parts, parts_of, read_parcel
from atoll.network.protocol.messages import MAX_WAIT
from atoll.network.protocol.objects import ObjectError


class _Ask(NamedTuple):
    """A request to make."""

    told: SessionPart
    body: bytes


@final
class Lanes:
    """Sends and receives the messages of one session, in order; `with` it, or threads stay."""

    def __init__(self, connection: Connection, run: str, attempt: int, session: str, max_bytes: int) -> None:
        self._connection, self._run, self._attempt, self._session = connection, run, attempt, session
        self._max_parts = num_parts(max_bytes)
        self.transcript = Transcript()
        self._changed = threading.Condition()
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._parts: dict[int, dict[int, bytes]] = {}
        """Number of a message down -> its parts that are here."""
        self._num_parts: dict[int, int] = {}
        self._asked: set[tuple[int, int]] = set()
        """Parts of messages down that some request waits for."""
        self._num_sent = self._num_heard = self._taken = 0
        self._open = 0
        """Requests that carry something up and have no answer yet."""
        self._failure: BaseException | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for _ in self._threads:
            self._asks.put(None)

    def send(self, data: bytes, cause: int, *, last: bool = False) -> None:
        """Send the next message, in answer to the server's of a number; return at once. The last has no answer."""
        self.transcript.add("up", data)
        number, self._num_sent = self._num_sent, self._num_sent + 1
        with self._changed:
            known = number < self._taken
        if known:
            return
        parts = parts_of(data)
        for part, body in enumerate(parts):
            want, want_part = (NONE, 0) if last else self._next_wanted(part)
            told = SessionPart(
                session=self._session,
                number=number,
                part=part,
                parts=len(parts),
                cause=cause,
                want=want,
                want_part=want_part,
                wait=0.0 if want == NONE else MAX_WAIT,
            )
            self._ask(told, bytes(body))

    def receive(self) -> bytes:
        """Return the next message of the server, when it is here."""
        with self._changed:
            while (data := self._whole(self._num_heard)) is None:
                self._raise_failure()  # before the wait, too: who failed earlier wakes nobody
                self._ask_for(self._num_heard)
                self._changed.wait()
            self._num_heard += 1
        self.transcript.add("down", data)
        return data

    def flush(self) -> None:
        """Wait until the server has all that was sent."""
        with self._changed:
            while self._open and self._failure is None:
                self._changed.wait()
            self._raise_failure()

    def _whole(self, number: int) -> bytes | None:
        """Return a message all of whose parts are here, and forget it."""
        parts = self._parts.get(number, {})
        if number not in self._num_parts or len(parts) < self._num_parts[number]:
            return None
        del self._parts[number], self._num_parts[number]
        self._asked = {each for each in self._asked if each[0] != number}
        return b"".join(parts[part] for part in sorted(parts))

    def _ask_for(self, number: int) -> None:
        """Ask for the parts of a message down that nobody waits for."""
        here = self._parts.get(number, {})
        for part in range(self._num_parts.get(number, 1)):
            if part not in here and (number, part) not in self._asked:
                self._asked.add((number, part))
                self._ask(SessionPart(session=self._session, want=number, want_part=part, wait=MAX_WAIT), b"")

    def _next_wanted(self, part: int) -> tuple[int, int]:
        """Choose what a request with a part of a message waits for: as a rule one message is answered by one."""
        with self._changed:
            number = self._num_heard
            if part:
                number = max((each for each, _ in self._asked), default=number)
            else:
                while any(each == number for each, _ in self._asked) or number in self._num_parts:
                    number += 1
            if (number, part) in self._asked or part >= self._max_parts:
                return NONE, 0
            self._asked.add((number, part))
            return number, part

    def _ask(self, told: SessionPart, body: bytes) -> None:
        with self._changed:
            self._open += told.number != NONE
            if self._idle <= self._asks.qsize() and len(self._threads) < LANES:
                thread = threading.Thread(target=self._work, daemon=True, name="session")
                self._threads.append(thread)
                thread.start()
        self._asks.put(_Ask(told, body))

    def _work(self) -> None:
        """Make requests until the session is over."""
        while True:
            with self._changed:
                self._idle += 1
            ask = self._asks.get()
            with self._changed:
                self._idle -= 1
            if ask is None or self._is_over:
                return
            try:
                self._note(ask.told, self._answer(ask))
            except BaseException as error:  # raised where the session is held
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
                return

    def _answer(self, ask: _Ask) -> Parcel:
        data = self._connection.ask(
            endpoints.EXCHANGE,
            ask.body,
            wait=ask.told.wait,
            metadata=ask.told,
            run=self._run,
            attempt=self._attempt,
        )
        try:
            parcel = read_parcel(data)
        except msgspec.MsgspecError as error:
            raise ObjectError(
                f"the server's part of a session is not understood ({error}): tell the operator"
            ) from error
        if parcel.parts > self._max_parts:
            raise ObjectError(
                f"the server sends a message of {parcel.parts} parts, at most {self._max_parts} are due: tell the "
                "operator"
            )
        return parcel

    def _note(self, told: SessionPart, parcel: Parcel) -> None:
        with self._changed:
            self._taken = max(self._taken, parcel.taken)
            self._open -= told.number != NONE
            self._asked.discard((told.want, told.want_part))
            if told.want != NONE and parcel.parts and told.want >= self._num_heard:
                self._num_parts[told.want] = parcel.parts
                if told.want_part < parcel.parts:
                    self._parts.setdefault(told.want, {})[told.want_part] = parcel.data
                    self._asked.add((told.want, told.want_part))
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
