"""The operator's own address: JSON over HTTP on this machine, with a token of its own; nothing of it is for clients.

Everything but /health and /metrics needs the header `authorization: Bearer TOKEN`, with the token of operator.token in
the server's home. From elsewhere it is reached through a tunnel, such as that of ssh.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import anyio.to_thread
import msgspec
import uvicorn
from msgspec import Meta
from sqlalchemy.exc import DBAPIError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atoll.core.errors import AtollError, RunError
from atoll.core.plan import Plan
from atoll.network.protocol.agreement import must_name_no_code
from atoll.network.protocol.messages import MAX_CONTROL
from atoll.network.protocol.operator import TOKEN, operator_token, write_address
from atoll.network.server.auth import Refused
from atoll.network.server.metrics import Metrics
from atoll.network.server.web import TooLarge, content_length, listening_socket, read_body, web_server

MAX_TOKEN_SECONDS = 30 * 86400


class OperatorService(Protocol):
    """What an operator can ask of a server. Methods are called in threads: they may wait for the disk."""

    metrics: Metrics

    def status(self) -> dict[str, Any]:
        """How the server, its runs and its clients are."""

    def clients(self) -> list[dict[str, Any]]:
        """Everybody who is, or wants to be, part of the federation."""

    def approve(self, names: list[str], samples: int | None, /) -> list[int]:
        """Let clients in, by name or id, who have so many samples each; their numbers, in this order."""

    def revoke(self, name: str, /) -> None:
        """Shut a client out."""

    def token(self, seconds: float, /) -> str:
        """Something that lets one client enrol within so many seconds."""

    def add_run(self, run: str, plan: Plan, /) -> None:
        """Begin another run."""

    def stop_run(self, run: str, /) -> None:
        """End a run with what it has."""

    def ledger_lines(self, run: str, /) -> list[str]:
        """The ledger of a run."""

    def shut_down(self) -> None:
        """End the process, politely."""


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that says all in its path."""


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients, by name or id."""

    names: Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class Approved(Names, frozen=True, forbid_unknown_fields=True):
    """Clients that are let in, and how many samples each of them has, where the operator knows that."""

    samples: Annotated[int, Meta(ge=1)] | None = None


class TokenFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long somebody has to enrol."""

    seconds: Annotated[float, Meta(gt=0, le=MAX_TOKEN_SECONDS)]


class NewRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run and its plan."""

    run: str
    plan: dict[str, Any]


class RunName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that there is."""

    run: str


class Command(NamedTuple):
    """One thing that an operator can ask for."""

    method: str
    path: str
    work: Callable[[OperatorService, Any, dict[str, str]], Any]
    """(server, what was told, what the path says) -> the answer, as plain data, or None."""
    body: type[msgspec.Struct] = Nothing


def _add_run(operations: OperatorService, told: NewRun, path: dict[str, str]) -> dict[str, str]:
    must_name_no_code({key: value for key, value in told.plan.items() if key != "name"}, "the plan")
    operations.add_run(told.run, Plan.read(told.plan))
    return {"run": told.run}


def _revoke(operations: OperatorService, told: Names, path: dict[str, str]) -> None:
    for name in told.names:
        operations.revoke(name)


def _known(operations: OperatorService, run: str) -> str:
    if all(run != each["run"] for each in operations.status()["runs"]):
        raise RunError(f"there is no run {run!r:.80}: see atoll runs list")
    return run


COMMANDS = (
    Command("GET", "/status", lambda operations, told, path: operations.status()),
    Command("GET", "/clients", lambda operations, told, path: {"clients": operations.clients()}),
    Command(
        "POST",
        "/clients/approve",
        lambda operations, told, path: {"numbers": operations.approve(told.names, told.samples)},
        Approved,
    ),
    Command("POST", "/clients/revoke", _revoke, Names),
    Command(
        "POST", "/clients/token", lambda operations, told, path: {"token": operations.token(told.seconds)}, TokenFor
    ),
    Command("POST", "/runs", _add_run, NewRun),
    Command(
        "POST", "/runs/stop", lambda operations, told, path: operations.stop_run(_known(operations, told.run)), RunName
    ),
    Command(
        "GET",
        "/runs/{run}/ledger",
        lambda operations, told, path: {"lines": operations.ledger_lines(_known(operations, path["run"]))},
    ),
    Command("POST", "/stop", lambda operations, told, path: operations.shut_down()),
)


def admin_app(operations: OperatorService, token: str) -> Starlette:
    """The operator's endpoints for a server."""

    async def health(request: Request) -> Response:
        server = (await anyio.to_thread.run_sync(operations.status))["server"]
        if server["read_only"]:
            return Response(str(server["why"]), HTTPStatus.SERVICE_UNAVAILABLE, media_type="text/plain")
        return Response("ok", media_type="text/plain")

    async def metrics(request: Request) -> Response:
        return Response(operations.metrics.text(), headers={"content-type": Metrics.content_type})

    def endpoint(command: Command) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            _must_be_operator(request, token)
            body = await read_body(request.receive, content_length(dict(request.headers), MAX_CONTROL))
            told = msgspec.json.decode(body or b"{}", type=command.body)
            return _json(await anyio.to_thread.run_sync(command.work, operations, told, request.path_params) or {})

        return answer

    routes = [Route("/health", health), Route("/metrics", metrics)]
    routes += [Route(each.path, endpoint(each), methods=[each.method]) for each in COMMANDS]
    handlers: Any = dict.fromkeys((AtollError, HTTPException, msgspec.MsgspecError, DBAPIError), _problem)
    return Starlette(routes=routes, exception_handlers=handlers)


def open_admin(
    operations: OperatorService, home: Path, port: int, host: str = "127.0.0.1"
) -> tuple[uvicorn.Server, socket.socket]:
    """What to serve the operator with, and the socket that it listens on; the address is written to the home.

    With port 0 the system chooses one.
    """
    server: uvicorn.Server = web_server(admin_app(operations, operator_token(home)), host, port, None)
    listener = listening_socket(host, port)
    write_address(home, *listener.getsockname()[:2])
    return server, listener


def _must_be_operator(request: Request, token: str) -> None:
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
