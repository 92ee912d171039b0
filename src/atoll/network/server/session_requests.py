"""Requests of sessions: parts of messages come in and go out, and at the end a client signs what was exchanged."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec

from atoll.ledger import signing
from atoll.network.protocol.exchange import NONE, Parcel, SessionEnd, SessionPart
from atoll.network.protocol.identity import holds
from atoll.network.protocol.messages import Done
from atoll.network.server.answers import Later, Request
from atoll.network.server.auth import Refused
from atoll.network.server.driver import RunDriver
from atoll.network.server.handler import MAX_LOSS
from atoll.network.server.runs import Run
from atoll.network.server.streams import OVER, Stream

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class SessionRequests:
    """Answers the requests of clients in sessions; the parts that may wait do so in the event loop."""

    def __init__(self, driver: RunDriver, in_thread: InThread) -> None:
        self._driver, self._in_thread = driver, in_thread

    async def exchange(self, request: Request) -> Later:
        """Take a part of a message, and return what waits for the part that is asked for."""
        told = request.parse_metadata(SessionPart)
        _, stream = self._stream(request, told.session)
        self._driver.presence.note_request(request.client.number)

        def take() -> None:
            request.check_body()
            stream.put(told, request.body)

        if request.body:
            await self._in_thread(take)
        else:
            take()
        return Later(lambda: self._answer(stream, told))

    async def _answer(self, stream: Stream, told: SessionPart) -> bytes:
        """Return a part of a message as soon as it is there, or nothing when the time is up."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        forget = stream.when_news(lambda: _call_soon(loop, news.set))
        found: tuple[int, bytes] | None = None
        try:
            async with asyncio.timeout(told.wait or None):
                while told.want != NONE:
                    news.clear()
                    found = stream.part(told.want, told.want_part)
                    if found is not None or not told.wait:
                        break
                    await news.wait()
        except TimeoutError:
            pass
        finally:
            forget()
        parts, data = (0, b"") if found is None else found
        return msgspec.msgpack.encode(Parcel(stream.num_whole, parts, data))

    def end(self, request: Request, body: SessionEnd) -> Done:
        """Note a client's signed word about its session, or why it leaves."""
        run, stream = self._stream(request, body.session)
        if not body.reason:
            why = self._why_not_whole(run, request, stream, body)
            if why:
                stream.finish(SessionEnd(session=body.session, reason=why))
                raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, why)
        stream.finish(body)
        return Done()

    def _why_not_whole(self, run: Run, request: Request, stream: Stream, end: SessionEnd) -> str:
        """Return what is wrong with a client's word that its session is whole; "" if nothing is."""
        version, parties = run.machine.version, run.parts.parties
        model = run.models.get(version)
        if end.transcript is None or end.signature is None or model is None or end.broadcast != model.ref.name:
            return "a whole session has a transcript, a signature and the name of the order's model: send them"
        if end.transcript != stream.transcript.name():
            return "the transcript is not that of what the server has exchanged: begin the session anew"
        knows = parties is not None and parties.states_loss(stream.client)
        if (end.loss is not None and not abs(end.loss) <= MAX_LOSS) or (knows and end.loss is None):
            return "the training loss is not a number: check the client's data and learning rate"
        if not math.isfinite(end.weight):
            return f"a weight of {end.weight} makes no sense: it is the number of samples"
        text = signing.update_text(
            run.name,
            request.attempt,
            version,
            end.transcript,
            end.num_samples,
            end.loss,
            end.weight,
            end.broadcast,
        )
        return "" if holds(request.client.key, text, end.signature) else "it is not signed with this client's key"

    def _stream(self, request: Request, session: str) -> tuple[Run, Stream]:
        """Return the session of a client that a request names."""
        run, number = self._driver.runs.get(request.run), request.client.number
        stream = run.stream(number) if isinstance(run, Run) and number is not None else None
        if not isinstance(run, Run) or stream is None or stream.session != session:
            raise Refused(HTTPStatus.GONE, OVER)
        if run.machine.attempt != request.attempt:
            raise Refused(HTTPStatus.GONE, OVER)
        return run, stream


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call a function in an event loop, unless that has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
