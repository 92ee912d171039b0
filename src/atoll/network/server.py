"""The server's face to clients: the protocol's endpoints over HTTPS, each as a function of the hub."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import msgspec
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atoll.core.errors import AtollError
from atoll.network.clerk import RETRY
from atoll.network.gate import Refused
from atoll.network.hub import Hub
from atoll.network.identity import Stamp, read_stamp
from atoll.network.logs import log
from atoll.network.objects import CHUNK, ObjectError
from atoll.network.protocol import (
    ENDPOINTS,
    LINES,
    MAX_CONTROL,
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
)
from atoll.network.tables import ClientRow
from atoll.network.web import TooLarge, read_body

M = TypeVar("M", bound=Message)
MAX_PATH = 400
MAX_GREETING = 1 << 14
"""Bytes that are read of somebody who has no session."""
POLL = "/v1/poll"


class Stranger(AtollError):
    """Somebody without a session who wants to send much."""


class Call(NamedTuple):
    """A request that was let in."""

    client: ClientRow | None
    path: dict[str, str]
    body: bytes
    body_hash: str

    @property
    def who(self) -> ClientRow:
        """The client that signed it."""
        assert self.client is not None
        return self.client

    @property
    def attempt(self) -> int:
        """The attempt that the path names."""
        return _number(self.path["attempt"])

    def read(self, kind: type[M]) -> M:
        """The body as a message."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise Refused(
                HTTPStatus.BAD_REQUEST, f"the request is not understood ({error}): see the protocol"
            ) from error


Answering = Callable[[Call], Message | bytes]
"""Runs in a thread of its own: it may wait for the disk."""


class Server:
    """Answers clients; `app` is what uvicorn serves."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        hub.conductor.wake = self._wake
        answers: dict[str, Answering] = {
            "/v1/about": self._about,
            "/v1/enrol": self._enrol,
            "/v1/challenge": self._challenge,
            "/v1/session": self._session,
            "/v1/runs/{run}": self._run,
            "/v1/runs/{run}/ledger/{start}": self._ledger,
            "/v1/runs/{run}/objects/{name}": self._manifest,
            "/v1/runs/{run}/objects/{name}/{index}": self._chunk,
            "/v1/runs/{run}/tasks/{attempt}/missing": self._missing,
            "/v1/runs/{run}/tasks/{attempt}/chunks/{digest}": self._put,
            "/v1/runs/{run}/tasks/{attempt}/update": self._update,
            "/v1/runs/{run}/tasks/{attempt}/secure": self._secure,
            "/v1/runs/{run}/tasks/{attempt}/ready": self._ready,
            "/v1/runs/{run}/tasks/{attempt}/refuse": self._refuse,
        }
        routes = [
            Route(each.path, self._serve(each, answers.get(each.path, _nothing)), methods=[each.method])
            for each in ENDPOINTS
        ]
        document = msgspec.json.encode(openapi())
        routes.append(Route("/v1/openapi.json", lambda request: Response(document, media_type="application/json")))
        self.app = Starlette(routes=routes)
        self.app.router.redirect_slashes = False  # a path is as it was signed, or it is nothing

    def end(self) -> None:
        """Answer all who wait, so that the process can end."""
        self._ending = True
        for event in self._waiting.values():
            event.set()

    def _serve(self, endpoint: Endpoint, answer: Answering) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint as starlette wants it: who it is, whether it may, how long it is, and what went wrong."""
        most = CHUNK if endpoint.method == "PUT" else MAX_CONTROL

        async def served(request: Request) -> Response:
            received, problem, headers = 0, Problem(""), dict[str, str]()
            try:
                stamp = self._stamp(endpoint, request)
                body = await self._body(request, stamp, most)
                received = len(body)
                call = partial(self._let_in, stamp, request, body)
                if endpoint.path == POLL:
                    found: Message | bytes = await self._poll(await run_sync(call))
                else:
                    found = await run_sync(lambda: answer(call()))
                content = found if isinstance(found, bytes) else msgspec.json.encode(found)
                kind = "application/octet-stream" if isinstance(found, bytes) else "application/json"
                response = Response(content, media_type=kind)
            except Refused as refused:
                problem, status = Problem(str(refused), refused.retry), refused.status
            except (Stranger, TooLarge) as error:
                headers["connection"] = "close"  # the rest is not even read
                code = HTTPStatus.UNAUTHORIZED if isinstance(error, Stranger) else HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                problem, status = Problem(str(error)), code
            except ObjectError as error:
                problem, status = Problem(str(error)), HTTPStatus.UNPROCESSABLE_ENTITY
            except Exception as error:
                problem, status = self._trouble(endpoint, error)
            if problem.error:
                content = msgspec.json.encode(problem)
                if problem.retry is not None:
                    headers["retry-after"] = str(int(problem.retry) + 1)
                response = Response(content, status, headers, media_type="application/json")
            self._hub.metrics.request(endpoint.path, response.status_code, received, len(response.body))
            return response

        return served

    async def _body(self, request: Request, stamp: Stamp | None, most: int) -> bytes:
        """What was sent; of somebody who has no session only little is read."""
        known = stamp is not None and self._hub.gate.has_session(stamp.client)
        try:
            return await read_body(dict(request.headers), request.receive, most if known else MAX_GREETING)
        except TooLarge:
            if stamp is not None and not known:
                raise Stranger("there is no such session: begin one") from None
            raise

    def _trouble(self, endpoint: Endpoint, error: Exception) -> tuple[Problem, HTTPStatus]:
        """Say that it cannot be done now; a defect here is no reason to tell strangers about it."""
        busy = self._hub.conductor.clerk.busy(error)
        if busy is not None:
            return Problem(str(busy), busy.retry), busy.status
        log("rejected", why=f"{endpoint.path}: {type(error).__name__}: {error}")
        return Problem("the server met a defect of its own", RETRY), HTTPStatus.INTERNAL_SERVER_ERROR

    def _stamp(self, endpoint: Endpoint, request: Request) -> Stamp | None:
        """Who says that a request is theirs; None where nobody must."""
        headers = dict(request.headers)
        if headers.get(VERSION_HEADER, str(VERSION)) != str(VERSION):
            raise Refused(
                HTTPStatus.UPGRADE_REQUIRED,
                f"this server speaks version {VERSION} of the protocol, the client {headers[VERSION_HEADER][:20]}: "
                "let both run the same version of Atoll",
            )
        if len(request.scope["raw_path"]) > MAX_PATH:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of this name")
        stamp = read_stamp(headers) if endpoint.signed else None
        if endpoint.signed and stamp is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "the request is not signed: begin a session")
        return stamp

    def _let_in(self, stamp: Stamp | None, request: Request, body: bytes) -> Call:
        """A request by somebody who may make it."""
        client, digest = None, ""
        if stamp is not None:
            digest = hashlib.sha256(body).hexdigest()
            client = self._hub.gate.check(stamp, request.method, request.scope["raw_path"].decode("ascii"), digest)
        return Call(client, request.path_params, body, digest)

    def _about(self, call: Call) -> Message:
        return About((VERSION,), self._hub.server_key, int(self._hub.now()))

    def _enrol(self, call: Call) -> Message:
        asked = call.read(Enrol)
        client = self._hub.gate.enrol(asked.token, asked.name, asked.key, asked.signature)
        log("session", client=asked.name, why="enrolled")
        return Enrolled(client)

    def _challenge(self, call: Call) -> Message:
        return Nonce(self._hub.gate.challenge(call.read(Challenge).client))

    def _session(self, call: Call) -> Message:
        hello = call.read(Hello)
        epoch, client = self._hub.gate.open_session(hello.client, hello.nonce, hello.signature)
        assert client.number is not None
        log("session", client=client.name, epoch=epoch)
        return Welcome(epoch, client.number, client.name)

    async def _poll(self, call: Call) -> Message:
        """Answer when there is something to do, or when the time is up."""
        poll, number = call.read(Poll), call.who.number
        assert number is not None
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        before, self._waiting[number] = self._waiting.get(number), event
        if before is not None:
            before.set()
        try:
            found: Orders = await run_sync(self._hub.desk.orders, call.who, poll)
            if not found.orders and set(found.ended) <= set(poll.ended) and poll.wait and not self._ending:
                with self._hub.metrics.waiting():
                    try:
                        await asyncio.wait_for(event.wait(), poll.wait)
                    except TimeoutError:
                        return found
                found = await run_sync(self._hub.desk.orders, call.who, poll)
        finally:
            if self._waiting.get(number) is event:
                del self._waiting[number]
        return found

    def _wake(self, numbers: set[int]) -> None:
        """Let polls of these clients look again; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, numbers)

    def _ring(self, numbers: set[int]) -> None:
        for number in numbers:
            event = self._waiting.get(number)
            if event is not None:
                event.set()

    def _run(self, call: Call) -> Message:
        return self._hub.desk.info(call.path["run"])

    def _ledger(self, call: Call) -> Message:
        lines = self._hub.desk.lines(call.path["run"], _number(call.path["start"]), LINES)
        return Lines(_within(lines))

    def _manifest(self, call: Call) -> bytes:
        _, objects = self._hub.desk.readable(call.who, call.path["run"], call.path["name"])
        return msgspec.msgpack.encode(objects.manifest(call.path["name"]))

    def _chunk(self, call: Call) -> bytes:
        run, objects = self._hub.desk.readable(call.who, call.path["run"], call.path["name"])
        data = objects.part(call.path["name"], _number(call.path["index"]))
        self._hub.desk.sent(run, len(data))
        return data

    def _missing(self, call: Call) -> Message:
        manifest = call.read(Answer).manifest
        return self._hub.desk.missing(call.who, call.path["run"], call.attempt, manifest)

    def _put(self, call: Call) -> Message:
        path = call.path
        self._hub.desk.put_chunk(call.who, path["run"], call.attempt, path["digest"], call.body, call.body_hash)
        return Done()

    def _update(self, call: Call) -> Message:
        told = call.read(Delivery)
        return self._hub.desk.deliver(call.who, call.path["run"], call.attempt, told)

    def _secure(self, call: Call) -> Message:
        manifest = call.read(Answer).manifest
        self._hub.desk.answer(call.who, call.path["run"], call.attempt, manifest)
        return Done()

    def _ready(self, call: Call) -> Message:
        self._hub.desk.ready(call.who, call.path["run"], call.attempt)
        return Done()

    def _refuse(self, call: Call) -> Message:
        reason = call.read(Refusal).reason
        self._hub.desk.refuse(call.who, call.path["run"], call.attempt, reason)
        return Done()


def _nothing(call: Call) -> Message:
    """Stands where polls are answered, which wait outside of threads."""
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
