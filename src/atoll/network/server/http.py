"""The protocol's endpoints over HTTP: checks who asks, bounds what is read, and maps errors to answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from atoll.network.protocol import endpoints
from atoll.network.protocol.endpoints import METADATA_HEADER, OPENAPI_PATH, Body, Endpoint, Reply, openapi
from atoll.network.protocol.identity import BODY_HEADER, read_stamp
from atoll.network.protocol.messages import VERSION, VERSION_HEADER, Problem
from atoll.network.protocol.objects import ObjectError
from atoll.network.server.answers import Answers, Later, Request, WaitingPolls
from atoll.network.server.auth import Refused
from atoll.network.server.limits import BodyLimits, TrackedConnection, UnauthenticatedPool
from atoll.network.server.monitoring import log
from atoll.network.server.operations import Operations
from atoll.network.server.session_requests import SessionRequests
from atoll.network.server.tables import ClientRow
from atoll.network.server.web import CONNECTION, BadRequest, TooLarge, content_length, read_body, read_headers
from atoll.network.server.writer import RETRY

T = TypeVar("T")
MAX_PATH = 400
"""Bytes of the longest path."""
THREADS = 32
"""Signed requests that are worked on at once."""


@dataclass(frozen=True)
class AsgiEndpoint:
    """An endpoint as an ASGI application."""

    respond: Callable[[Scope, Receive], Awaitable[Response]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        response = await self.respond(scope, receive)
        await response(scope, receive, send)


class ClientApi:
    """Answers clients; `app` is the ASGI application."""

    def __init__(self, operations: Operations) -> None:
        self._operations, self._authenticator = operations, operations.authenticator
        self._body_limits, self._unauthenticated = BodyLimits(), UnauthenticatedPool()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="server")
        self._polls = WaitingPolls(operations, self._in_thread)
        operations.driver.wake = self._polls.wake
        answers, threaded = Answers(operations), self._threaded
        sessions = SessionRequests(operations.driver, self._in_thread)
        document = msgspec.json.encode(openapi())
        routes = [
            threaded(endpoints.ABOUT, answers.about),
            threaded(endpoints.ENROL, answers.enrol),
            threaded(endpoints.CHALLENGE, answers.challenge),
            threaded(endpoints.SESSION, answers.session),
            self._route(endpoints.POLL, self._polls.answer),
            threaded(endpoints.RUNS, answers.runs),
            threaded(endpoints.RUN, answers.run),
            threaded(endpoints.LEDGER, answers.ledger),
            threaded(endpoints.MANIFEST, answers.manifest),
            threaded(endpoints.GET_CHUNK, answers.get_chunk),
            threaded(endpoints.MISSING, answers.missing),
            threaded(endpoints.PUT_CHUNK, answers.put_chunk),
            threaded(endpoints.UPDATE, answers.update),
            threaded(endpoints.PUT_UPDATE, answers.put_update),
            threaded(endpoints.SECURE, answers.secure),
            self._route(endpoints.EXCHANGE, sessions.exchange),
            threaded(endpoints.END_SESSION, sessions.end),
            threaded(endpoints.READY, answers.ready),
            threaded(endpoints.REFUSE, answers.refuse),
            threaded(endpoints.EVALUATION, answers.evaluation),
            threaded(endpoints.READINESS, answers.readiness),
            Route(OPENAPI_PATH, lambda request: Response(document, media_type="application/json")),
        ]
        self.app = Router(routes, redirect_slashes=False)  # the path is signed: no other may stand for it

    def end(self) -> None:
        """Answer all polls, so that the process can end."""
        self._polls.end()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        self._unauthenticated.close()

    def _threaded(
        self, endpoint: Endpoint[Body, Reply], answer: Callable[[Request, Body], Reply | Future[Any]]
    ) -> Route:
        """Serve an endpoint in threads, since its answer may wait for the disk; public ones have threads of their own.

        A future of the writer, which brings the answer or a `Refused`, is awaited in the event loop.
        """

        async def respond(request: Request) -> Reply:
            def work() -> Reply | Future[Any]:
                request.check_body()
                return answer(request, request.parse(endpoint))

            outcome: Any
            if request.sender is None:
                outcome = await self._unauthenticated.run(request.connection.address, work)
            else:
                outcome = await self._in_thread(work)
            if isinstance(outcome, Future):
                outcome = await asyncio.wrap_future(outcome)
            if isinstance(outcome, Refused):
                raise outcome
            reply: Reply = outcome
            return reply

        return self._route(endpoint, respond)

    def _route(self, endpoint: Endpoint[Any, Reply], respond: Callable[[Request], Awaitable[Reply | Later]]) -> Route:
        """Serve an endpoint: check the sender and the length, read the body, respond, count the request."""

        async def serve(scope: Scope, receive: Receive) -> Response:
            received = 0
            try:
                headers = read_headers(scope)
                length = content_length(headers, endpoint.max_body)
                connection: TrackedConnection = scope["extensions"][CONNECTION]
                sender = await self._sender(endpoint, scope, headers, connection)
                received = length
                limits, patient = self._body_limits, endpoint is endpoints.EXCHANGE
                async with limits.reserve(sender.id, length, patient=patient) if sender is not None else nullcontext():
                    request = Request(
                        sender=sender,
                        parameters=scope["path_params"],
                        body=await read_body(receive, length),
                        body_hash=headers.get(BODY_HEADER, ""),
                        metadata=headers.get(METADATA_HEADER, ""),
                        connection=connection,
                    )
                    reply: Any = await respond(request)
                    del request  # what is waited for holds no body
                if isinstance(reply, Later):
                    reply = await reply.wait()
                if sender is not None and not self._authenticator.is_cached(sender.id):
                    # it may have been revoked while it waited
                    await self._in_thread(partial(self._authenticator.approved, sender.id))
                content = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
                kind = "application/octet-stream" if isinstance(reply, bytes) else "application/json"
                response = Response(content, media_type=kind)
            except Exception as error:
                response = self._problem(endpoint, error)
            self._operations.metrics.request(endpoint.path, response.status_code, received, len(response.body))
            return response

        return Route(endpoint.path, AsgiEndpoint(serve), methods=[endpoint.method])

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _problem(self, endpoint: Endpoint[Any, Any], error: Exception) -> Response:
        """Turn an error into the answer that tells it; details of a defect are logged and not sent."""
        headers: dict[str, str] = {}
        refused: Refused | None
        match error:
            case Refused():
                refused = error
            case BadRequest():
                refused = Refused(HTTPStatus.BAD_REQUEST, str(error))
            case TooLarge():
                headers["connection"] = "close"  # the rest is not even read
                refused = Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error))
            case ObjectError():
                refused = Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            case _:
                refused = self._operations.driver.writer.as_unavailable(error)
        if refused is None:
            log("rejected", why=f"{endpoint.path}: {type(error).__name__}: {error}")
            refused = Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the server met a defect of its own", RETRY)
        if refused.retry is not None:
            headers["retry-after"] = str(int(refused.retry) + 1)
        content = msgspec.json.encode(Problem(str(refused), refused.retry))
        return Response(content, refused.status, headers, media_type="application/json")

    async def _sender(
        self, endpoint: Endpoint[Any, Any], scope: Scope, headers: dict[str, str], connection: TrackedConnection
    ) -> ClientRow | None:
        """Return the client that signed the request's head, before any of its body is read; None if it is public.

        The body of a refused request is still read and dropped, so that its sender receives the answer.
        """
        if headers.get(VERSION_HEADER, str(VERSION)) != str(VERSION):
            raise Refused(
                HTTPStatus.UPGRADE_REQUIRED,
                f"this server speaks version {VERSION} of the protocol, the client {headers[VERSION_HEADER][:20]}: "
                "let both run the same version of Atoll",
            )
        if len(scope["raw_path"]) > MAX_PATH:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of this name")
        if endpoint.public:
            return None
        if "atoll-signature" in headers and BODY_HEADER not in headers:
            raise Refused(
                HTTPStatus.UPGRADE_REQUIRED,
                f"a signed request names its body in {BODY_HEADER}: let both run the same version of Atoll",
            )
        stamp = read_stamp(headers)
        if stamp is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "the request is not signed: begin a session")
        path = scope["raw_path"].decode("ascii")
        check = partial(self._authenticator.authenticate, stamp, scope["method"], path)
        if self._authenticator.is_cached(stamp.client):
            client = check()
        else:  # it must be looked up, which strangers could cause as often as they like
            client = await self._unauthenticated.run(connection.address, check)
        connection.authenticate(client.id)
        return client
