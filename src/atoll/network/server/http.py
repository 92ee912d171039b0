"""The server's face to clients: the protocol's endpoints over HTTPS, each as a function of the hub."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from atoll.network.protocol.identity import BODY_HEADER, read_stamp
from atoll.network.protocol.messages import (
    ENDPOINTS,
    LINES,
    MAX_CONTROL,
    METADATA_HEADER,
    TASK,
    VERSION,
    VERSION_HEADER,
    About,
    Answer,
    Challenge,
    Delivery,
    Done,
    Endpoint,
    Enrol,
    Enrolled,
    Hello,
    Lines,
    Message,
    Nonce,
    Orders,
    Poll,
    Problem,
    Refusal,
    Welcome,
    openapi,
    read_message,
)
from atoll.network.protocol.objects import CHUNK, ObjectError
from atoll.network.server.auth import Refused
from atoll.network.server.body_limits import UNCOUNTED_BYTES, BodyLimits, UnauthenticatedPool
from atoll.network.server.connections import TrackedConnection
from atoll.network.server.logs import log
from atoll.network.server.operations import Operations
from atoll.network.server.tables import ClientRow
from atoll.network.server.web import CONNECTION, BadRequest, TooLarge, content_length, read_body, read_headers
from atoll.network.server.writer import RETRY

M = TypeVar("M", bound=Message)
T = TypeVar("T")
MAX_PATH = 400
MAX_UNSIGNED = UNCOUNTED_BYTES
"""Bytes of the largest request that nobody has to sign."""
THREADS = 32
"""So many requests are worked on at once at most."""


class Request(NamedTuple):
    """A request that was let in."""

    client: ClientRow | None
    path: dict[str, str]
    body: bytes
    body_hash: str
    """What the head says it is, in hexadecimal; `checked` finds out whether that is so."""
    told: str
    """What a header says of the body."""
    connection: TrackedConnection

    def checked(self) -> Request:
        """The request itself, if its body is the one that was signed."""
        if self.client is not None and hashlib.sha256(self.body).hexdigest() != self.body_hash:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not the one that {BODY_HEADER} names: send that one")
        return self

    @property
    def who(self) -> ClientRow:
        """The client that signed it."""
        assert self.client is not None
        return self.client

    @property
    def attempt(self) -> int:
        """The attempt that the path names."""
        return _number(self.path["attempt"])

    def read(self, kind: type[M], text: str | None = None) -> M:
        """The body, or another text, as a message."""
        try:
            return read_message(self.body if text is None else text.encode(), kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Refused(
                HTTPStatus.BAD_REQUEST, f"the request is not understood ({error}): see the protocol"
            ) from error


AnswerFunction = Callable[[Request], Message | bytes | Future[Any]]
"""Runs in a thread of its own: it may wait for the disk. A future brings the answer, or why there is none."""
Respond = Callable[[Scope, Receive], Awaitable[Response]]


@dataclass(frozen=True)
class AsgiEndpoint:
    """An endpoint as an ASGI application."""

    serve: Respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        response = await self.serve(scope, receive)
        await response(scope, receive, send)


class ClientApi:
    """Answers clients; `app` is what uvicorn serves."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._waiting: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        operations.driver.wake = self._wake
        self._body_limits, self._unauthenticated = BodyLimits(), UnauthenticatedPool()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="server")
        answers: dict[str, AnswerFunction] = {
            "GET /v1/about": self._about,
            "POST /v1/enrol": self._enrol,
            "POST /v1/challenge": self._challenge,
            "POST /v1/session": self._session,
            "GET /v1/runs/{run}": self._run,
            "GET /v1/runs/{run}/ledger/{start}": self._ledger,
            "GET /v1/runs/{run}/objects/{name}": self._manifest,
            "GET /v1/runs/{run}/objects/{name}/{index}": self._chunk,
            f"POST {TASK}/missing": self._missing,
            f"PUT {TASK}/chunks/{{digest}}": self._put,
            f"POST {TASK}/update": self._update,
            f"PUT {TASK}/update": self._whole_update,
            f"POST {TASK}/secure": self._secure,
            f"POST {TASK}/ready": self._ready,
            f"POST {TASK}/refuse": self._refuse,
        }
        routes = [
            Route(
                each.path,
                AsgiEndpoint(self._serve(each, answers.get(f"{each.method} {each.path}"))),
                methods=[each.method],
            )
            for each in ENDPOINTS
        ]
        document = msgspec.json.encode(openapi())
        routes.append(Route("/v1/openapi.json", lambda request: Response(document, media_type="application/json")))
        self.app = Router(routes, redirect_slashes=False)  # a path is as it was signed, or it is nothing

    def end(self) -> None:
        """Answer all who wait, so that the process can end."""
        self._ending = True
        for event in self._waiting.values():
            event.set()

    def close(self) -> None:
        """Let threads end."""
        self._threads.shutdown()
        self._unauthenticated.close()

    def _serve(self, endpoint: Endpoint, answer: AnswerFunction | None) -> Respond:
        """An endpoint: who it is, whether it may, how long it is, and what went wrong. Without `answer`: polls."""
        most = MAX_UNSIGNED if not endpoint.signed else CHUNK if endpoint.method == "PUT" else MAX_CONTROL

        async def served(scope: Scope, receive: Receive) -> Response:
            received, problem, headers = 0, Problem(""), dict[str, str]()
            try:
                said = read_headers(scope)
                length = content_length(said, most)
                connection: TrackedConnection = scope["extensions"][CONNECTION]
                client = await self._signer(endpoint, scope, said, connection)
                async with self._body_limits.reserve(client.id, length) if client is not None else nullcontext():
                    body = await read_body(receive, length)
                    received = len(body)
                    told, body_hash = said.get(METADATA_HEADER, ""), said.get(BODY_HEADER, "")
                    request = Request(client, scope["path_params"], body, body_hash, told, connection)
                    found = await (self._poll(request) if answer is None else self._answered(answer, request))
                if client is not None and not self._operations.authenticator.is_cached(client.id):
                    await self._in_thread(
                        partial(self._operations.authenticator.approved, client.id)
                    )  # it may be shut out by now
                content = found if isinstance(found, bytes) else msgspec.json.encode(found)
                kind = "application/octet-stream" if isinstance(found, bytes) else "application/json"
                response = Response(content, media_type=kind)
            except Refused as refused:
                problem, status = Problem(str(refused), refused.retry), refused.status
            except BadRequest as error:
                problem, status = Problem(str(error)), HTTPStatus.BAD_REQUEST
            except TooLarge as error:
                headers["connection"] = "close"  # the rest is not even read
                problem, status = Problem(str(error)), HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            except ObjectError as error:
                problem, status = Problem(str(error)), HTTPStatus.UNPROCESSABLE_ENTITY
            except Exception as error:
                problem, status = self._trouble(endpoint, error)
            if problem.error:
                content = msgspec.json.encode(problem)
                if problem.retry is not None:
                    headers["retry-after"] = str(int(problem.retry) + 1)
                response = Response(content, status, headers, media_type="application/json")
            self._operations.metrics.request(endpoint.path, response.status_code, received, len(response.body))
            return response

        return served

    async def _answered(self, answer: AnswerFunction, request: Request) -> Message | bytes:
        """Answer in a thread, and wait outside of it for what is written down together with others."""

        def work() -> Message | bytes | Future[Any]:
            return answer(request.checked())

        found: Any = await (
            self._unauthenticated.run(request.connection.address, work)
            if request.client is None
            else self._in_thread(work)
        )
        if isinstance(found, Future):
            found = await asyncio.wrap_future(found)
        if isinstance(found, Refused):
            raise found
        answered: Message | bytes = found
        return answered

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _trouble(self, endpoint: Endpoint, error: Exception) -> tuple[Problem, HTTPStatus]:
        """Say that it cannot be done now; a defect here is no reason to tell strangers about it."""
        busy = self._operations.driver.writer.as_unavailable(error)
        if busy is not None:
            return Problem(str(busy), busy.retry), busy.status
        log("rejected", why=f"{endpoint.path}: {type(error).__name__}: {error}")
        return Problem("the server met a defect of its own", RETRY), HTTPStatus.INTERNAL_SERVER_ERROR

    async def _signer(
        self, endpoint: Endpoint, scope: Scope, headers: dict[str, str], connection: TrackedConnection
    ) -> ClientRow | None:
        """The client that signed a request's head; None where nobody must. Nothing is read or kept of it before.

        What still comes of a request that is refused is dropped: who is sending it hears the answer, and may go on.
        """
        if headers.get(VERSION_HEADER, str(VERSION)) != str(VERSION):
            raise Refused(
                HTTPStatus.UPGRADE_REQUIRED,
                f"this server speaks version {VERSION} of the protocol, the client {headers[VERSION_HEADER][:20]}: "
                "let both run the same version of Atoll",
            )
        if len(scope["raw_path"]) > MAX_PATH:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of this name")
        if not endpoint.signed:
            return None
        if "atoll-signature" in headers and BODY_HEADER not in headers:
            raise Refused(
                HTTPStatus.UPGRADE_REQUIRED,
                f"a signed request names its body in {BODY_HEADER}: let both run the same version of Atoll",
            )
        stamp = read_stamp(headers)
        if stamp is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "the request is not signed: begin a session")
        authenticator, path = self._operations.authenticator, scope["raw_path"].decode("ascii")
        if authenticator.is_cached(stamp.client):
            client = authenticator.authenticate(stamp, scope["method"], path)
        else:  # a stranger, as far as anybody knows
            client = await self._unauthenticated.run(
                connection.address, partial(authenticator.authenticate, stamp, scope["method"], path)
            )
        connection.authenticate(client.id)
        return client

    def _about(self, request: Request) -> Message:
        return About((VERSION,), self._operations.server_key, int(self._operations.authenticator.now()))

    def _enrol(self, request: Request) -> Message:
        asked = request.read(Enrol)
        client = self._operations.authenticator.enrol(asked.token, asked.name, asked.key, asked.signature)
        log("session", client=asked.name, why="enrolled")
        return Enrolled(client)

    def _challenge(self, request: Request) -> Message:
        return Nonce(self._operations.authenticator.challenge(request.read(Challenge).client))

    def _session(self, request: Request) -> Message:
        hello = request.read(Hello)
        epoch, client = self._operations.authenticator.open_session(hello.client, hello.nonce, hello.signature)
        assert client.number is not None
        log("session", client=client.name, epoch=epoch)
        return Welcome(epoch, client.number, client.name)

    async def _poll(self, request: Request) -> Message:
        """Answer when there is something to do, or when the time is up; all in this thread, as far as memory goes."""
        poll, number, handler = request.checked().read(Poll), request.who.number, self._operations.handler
        assert number is not None
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        before, self._waiting[number] = self._waiting.get(number), event
        if before is not None:
            before.set()
        try:
            noted = handler.note_poll(request.who, poll)
            if noted is not None:
                await asyncio.wrap_future(noted)
            found = await self._orders(request.who, poll)
            if not found.orders and set(found.ended) <= set(poll.ended) and poll.wait and not self._ending:
                with self._operations.metrics.waiting():
                    try:
                        await asyncio.wait_for(event.wait(), poll.wait)
                    except TimeoutError:
                        return found
                found = await self._orders(request.who, poll)
        finally:
            if self._waiting.get(number) is event:
                del self._waiting[number]
        return found

    async def _orders(self, client: ClientRow, poll: Poll) -> Orders:
        """What a client has to do; while files are written for it, this is waited for elsewhere."""
        lock = self._operations.driver.writer.lock
        if not lock.acquire(blocking=False):
            return await self._in_thread(lambda: self._operations.handler.orders(client, poll))
        try:
            return self._operations.handler.orders(client, poll)
        finally:
            lock.release()

    def _wake(self, numbers: set[int]) -> None:
        """Let polls of these clients look again; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, numbers)

    def _ring(self, numbers: set[int]) -> None:
        for number in numbers:
            event = self._waiting.get(number)
            if event is not None:
                event.set()

    def _run(self, request: Request) -> Message:
        return self._operations.handler.run_info(request.path["run"])

    def _ledger(self, request: Request) -> Message:
        lines = self._operations.handler.ledger_lines(request.path["run"], _number(request.path["start"]), LINES)
        return Lines(_within(lines))

    def _manifest(self, request: Request) -> bytes:
        _, objects = self._operations.handler.readable_objects(request.who, request.path["run"], request.path["name"])
        return msgspec.msgpack.encode(objects.manifest(request.path["name"]))

    def _chunk(self, request: Request) -> bytes:
        run, objects = self._operations.handler.readable_objects(request.who, request.path["run"], request.path["name"])
        data = objects.part(request.path["name"], _number(request.path["index"]))
        self._operations.handler.count_sent(run, len(data))
        return data

    def _missing(self, request: Request) -> Message:
        manifest = request.read(Answer).manifest
        return self._operations.handler.missing(request.who, request.path["run"], request.attempt, manifest)

    def _put(self, request: Request) -> Message:
        path = request.path
        self._operations.handler.put_chunk(
            request.who, path["run"], request.attempt, path["digest"], request.body, request.body_hash
        )
        return Done()

    def _update(self, request: Request) -> Message | Future[Any]:
        return self._operations.handler.deliver(
            request.who, request.path["run"], request.attempt, request.read(Delivery)
        )

    def _whole_update(self, request: Request) -> Message | Future[Any]:
        told = request.read(Delivery, request.told)
        return self._operations.handler.deliver(
            request.who, request.path["run"], request.attempt, told, request.body, request.body_hash
        )

    def _secure(self, request: Request) -> Message:
        manifest = request.read(Answer).manifest
        self._operations.handler.answer_secure(request.who, request.path["run"], request.attempt, manifest)
        return Done()

    def _ready(self, request: Request) -> Message:
        self._operations.handler.ready(request.who, request.path["run"], request.attempt)
        return Done()

    def _refuse(self, request: Request) -> Message:
        self._operations.handler.refuse(request.who, request.path["run"], request.attempt, request.read(Refusal))
        return Done()


def _number(text: str) -> int:
    """A number in a path."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of this name")
    return int(text)


def _within(lines: list[str]) -> tuple[str, ...]:
    """As many lines as a control message can hold, but one at least."""
    kept: list[str] = []
    total = 0
    for line in lines:
        total += len(line) + 10
        if kept and total > MAX_CONTROL // 2:
            break
        kept.append(line)
    return tuple(kept)
