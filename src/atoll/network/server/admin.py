"""The operator's address: JSON over HTTP on this machine only.

All but public endpoints need the header `authorization: Bearer TOKEN`, with the token in operator.token in the server's
home. From elsewhere the address is reached through a tunnel, such as of ssh.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from sqlalchemy.exc import DBAPIError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atoll.core.errors import AtollError, RunError
from atoll.core.plan import Plan
from atoll.ledger.chain import OPERATOR
from atoll.network.protocol import operator_endpoints as endpoints
from atoll.network.protocol.agreement import check_names_no_code
from atoll.network.protocol.endpoints import Body, Endpoint, Reply
from atoll.network.protocol.operator import TOKEN, operator_token, write_address
from atoll.network.protocol.operator_endpoints import (
    AccessGiven,
    AccessId,
    Clients,
    LedgerLines,
    Names,
    NewAccess,
    NewRun,
    Nothing,
    Numbers,
    RunAdded,
    RunName,
    Token,
)
from atoll.network.server.access import Role
from atoll.network.server.auth import Refused
from atoll.network.server.monitoring import Metrics
from atoll.network.server.operations import Operations
from atoll.network.server.web import TooLarge, content_length, listening_socket, read_body, web_server


def admin_app(operations: Operations, token: str, more: Sequence[Route] = ()) -> Starlette:
    """Serve the operator's endpoints, all but public ones to who shows the token, and more routes beside them."""

    async def health(request: Request) -> Response:
        server = (await asyncio.to_thread(operations.status))["server"]
        if server["read_only"]:
            return Response(server["why"], HTTPStatus.SERVICE_UNAVAILABLE, media_type="text/plain")
        return Response("ok", media_type="text/plain")

    async def metrics(request: Request) -> Response:
        return Response(operations.metrics.text(), headers={"content-type": Metrics.content_type})

    def served(endpoint: Endpoint[Body, Reply], answer: Callable[[Body, dict[str, str]], Reply]) -> Route:
        async def respond(request: Request) -> Response:
            _check_token(request, token)
            data = await read_body(request.receive, content_length(dict(request.headers), endpoint.max_body))
            body = msgspec.json.decode(data or b"{}", type=endpoint.body)
            return _json(await asyncio.to_thread(answer, body, request.path_params))

        return Route(endpoint.path, respond, methods=[endpoint.method])

    actions = OperatorActions(operations)
    routes = [
        Route(endpoints.HEALTH.path, health),
        Route(endpoints.METRICS.path, metrics),
        served(endpoints.STATUS, lambda body, _: operations.status()),
        served(endpoints.CLIENTS, lambda body, _: Clients(clients=operations.clients())),
        served(endpoints.APPROVE, lambda body, _: Numbers(numbers=operations.approve(body.names, body.samples))),
        served(endpoints.REVOKE, actions.revoke),
        served(endpoints.TOKEN, lambda body, _: Token(token=operations.token(body.seconds))),
        served(endpoints.ADD_RUN, actions.add_run),
        served(endpoints.STOP_RUN, actions.stop_run),
        served(endpoints.LEDGER, actions.ledger),
        served(endpoints.GIVE_ACCESS, actions.give_access),
        served(endpoints.REVOKE_ACCESS, actions.revoke_access),
        served(endpoints.STOP, actions.stop),
        *more,
    ]
    handlers: Any = dict.fromkeys((AtollError, HTTPException, msgspec.MsgspecError, DBAPIError), _problem)
    return Starlette(routes=routes, exception_handlers=handlers)


class OperatorActions:
    """Answers of endpoints that are more than one call; they run in threads, as they may wait for the disk."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def add_run(self, body: NewRun, parameters: dict[str, str]) -> RunAdded:
        """Add a run; its plan comes over a network and must name no code."""
        check_names_no_code({key: value for key, value in body.plan.items() if key != "name"}, "the plan")
        self._operations.add_run(body.run, Plan.read(body.plan))
        return RunAdded(run=body.run)

    def revoke(self, body: Names, parameters: dict[str, str]) -> Nothing:
        """Revoke clients, one after another."""
        for name in body.names:
            self._operations.revoke(name)
        return Nothing()

    def stop_run(self, body: RunName, parameters: dict[str, str]) -> Nothing:
        """End a run."""
        self._operations.stop_run(self._existing(body.run))
        return Nothing()

    def ledger(self, body: object, parameters: dict[str, str]) -> LedgerLines:
        """Return the ledger of a run."""
        run = parameters["run"]
        return LedgerLines(lines=self._operations.ledger_lines(run if run == OPERATOR else self._existing(run)))

    def give_access(self, body: NewAccess, parameters: dict[str, str]) -> AccessGiven:
        """Make a link to the live page."""
        text, token = self._operations.give_access(body.name, Role(body.role), body.hours)
        return AccessGiven(id=token.id, token=text)

    def revoke_access(self, body: AccessId, parameters: dict[str, str]) -> Nothing:
        """Revoke a link to the live page."""
        self._operations.revoke_access(body.id)
        return Nothing()

    def stop(self, body: object, parameters: dict[str, str]) -> Nothing:
        """Stop the server."""
        self._operations.shut_down()
        return Nothing()

    def _existing(self, run: str) -> str:
        if all(run != each["run"] for each in self._operations.status()["runs"]):
            raise RunError(f"there is no run {run!r:.80}: see atoll runs list")
        return run


def open_admin(
    operations: Operations,
    home: Path,
    port: int,
    host: str = "127.0.0.1",
    *,
    more: Sequence[Route] = (),
) -> tuple[uvicorn.Server, socket.socket]:
    """Make the server of the operator's address and its socket, and write the address to the home.

    With port 0 the system chooses one. `more` routes are served beside the operator's endpoints.
    """
    server: uvicorn.Server = web_server(admin_app(operations, operator_token(home), more), host, port, None)
    listener = listening_socket(host, port)
    write_address(home, *listener.getsockname()[:2])
    return server, listener


def _check_token(request: Request, token: str) -> None:
    shown = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
        raise Refused(
            HTTPStatus.UNAUTHORIZED, f"this needs the operator's token: it is in {TOKEN} in the server's home"
        )


async def _problem(request: Request, error: Exception) -> Response:
    match error:
        case Refused():
            status, text = error.status, str(error)
        case HTTPException():
            status = HTTPStatus(error.status_code)
            text = f"{status.phrase}: there is no {request.method} {request.url.path:.100}"
        case DBAPIError():
            status = HTTPStatus.SERVICE_UNAVAILABLE
            text = f"the store does not serve: {' '.join(str(error.orig).split())}"
        case TooLarge():
            status, text = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)
        case _:
            status, text = HTTPStatus.BAD_REQUEST, str(error)
    return _json({"error": text}, status)


def _json(data: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")
