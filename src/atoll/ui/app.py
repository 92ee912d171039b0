"""The live page over HTTP: static files, JSON and a stream of changes; browsers are told to allow nothing else."""

from __future__ import annotations

import asyncio
import datetime
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from atoll.core.errors import AtollError
from atoll.ledger.chain import OPERATOR, Fault
from atoll.network.protocol.operator_endpoints import NewAccess
from atoll.network.server.access import Access, AccessToken, GuessLimit, Role, Session, plain_token
from atoll.network.server.auth import Refused
from atoll.network.server.web import CONNECTION, TooLarge, content_length, read_body
from atoll.ui.feed import Feed, Subscription, read_marker
from atoll.ui.ledgers import ledger_page, verified
from atoll.ui.rows import MAX_ROWS, csv_text
from atoll.ui.run_files import Json
from atoll.ui.runs import RunsDirectory

MAX_BODY, MAX_FOLLOWED = 1 << 20, 64
HTTPS_PORT = 443
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STATIC = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css", "LICENSES.txt": "text/plain"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SANDBOX = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
)
"""Of pages that were written to files, which have an origin of their own and their own policy beside this one."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Action(NamedTuple):
    """Something that an operator may do from the page."""

    body: Any
    """The type of its body."""
    do: Callable[[Any, str], Any]
    """Takes the body and who asks for it; returns what is answered."""


class Served(Protocol):
    """What a page is served for: a directory of runs, a simulation or a federation."""

    @property
    def kind(self) -> str:
        """Return `runs`, `simulation` or `federation`."""

    @property
    def actions(self) -> Mapping[str, Action]:
        """Return what an operator may do, by name."""

    def clients(self) -> list[Json] | None:
        """Return the clients of a federation; None for others."""

    def operator_ledger(self) -> list[str] | None:
        """Return the ledger of the operator's actions; None where there is none."""

    def give_access(self, name: str, role: Role, hours: float, by: str) -> tuple[str, AccessToken]:
        """Make a link to the page; return its token and what is kept of it."""

    def revoke_access(self, token_id: str, by: str) -> None:
        """Revoke a link to the page."""


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something by its id."""

    id: str


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that opens a session."""

    token: str


class Page:
    """The routes of the page, below `/ui`."""

    def __init__(self, served: Served, runs: RunsDirectory, access: Access, *, title: str) -> None:
        self._served, self._runs, self._access, self._title = served, runs, access, title
        self._feed = Feed(runs, served.clients)
        self._hosts: set[str] = set()
        """Names that browsers may reach the page by, with the port: others are another site's, rebound to here."""
        self._guesses = GuessLimit()
        self._actions = {**served.actions, "access_add": Action(NewAccess, self._access_add)}
        self._actions["access_revoke"] = Action(Named, self._access_revoke)

    def serve_at(self, port: int, names: Sequence[str] = LOOPBACK) -> None:
        """Say by which names, and at which port, browsers reach the page; may be called for several addresses."""
        named = {f"[{name}]" if ":" in name else name for name in names}
        self._hosts |= {f"{name}:{port}" for name in named} | (named if port == HTTPS_PORT else set())

    def close(self) -> None:
        """End all streams."""
        self._feed.close()

    def routes(self) -> list[Route]:
        """Return the routes for an application."""
        reads: dict[str, Callable[[Request, Session], Any]] = {
            "runs": lambda request, _: {"runs": list(self._runs.summaries().values())},
            "run": lambda request, _: self._run(request.query_params.get("id", "")),
            "rows": self._rows,
            "log": lambda request, _: {"text": self._runs.log(request.query_params.get("id", ""))},
            "ledger": self._ledger,
            "clients": self._clients,
            "access": self._tokens,
        }
        return [
            Route("/", lambda request: RedirectResponse("/ui/", headers=HEADERS)),
            Route("/ui", lambda request: RedirectResponse("/ui/", headers=HEADERS)),
            Route("/ui/", self._guarded(partial(self._static, "index.html"))),
            *(Route(f"/ui/{name}", self._guarded(partial(self._static, name))) for name in STATIC),
            Route("/ui/api/session", self._guarded(self._session), methods=["GET", "POST"]),
            Route("/ui/api/session/end", self._acting(None, self._end), methods=["POST"]),
            *(Route(f"/ui/api/{name}", self._reading(answer)) for name, answer in reads.items()),
            Route("/ui/api/ledger/verify", self._acting(Named, self._verify), methods=["POST"]),
            *(
                Route(f"/ui/api/actions/{name}", self._acting(action.body, partial(self._act, name)), methods=["POST"])
                for name, action in self._actions.items()
            ),
            Route("/ui/api/stream", self._guarded(self._stream)),
            Route("/ui/file", self._guarded(self._file)),
        ]

    # ---- who asks, and how answers go out

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Refuse what comes by another name than the page's, and add the headers that every answer has."""

        async def respond(request: Request) -> Response:
            try:
                if request.headers.get("host", "") not in self._hosts:
                    raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this page has another address: open its own link")
                response = await answer(request)
            except (AtollError, msgspec.MsgspecError) as error:
                response = _problem(error)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            response.headers.setdefault("content-security-policy", POLICY)
            return response

        return respond

    def _reading(self, answer: Callable[[Request, Session], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Answer who has a session, in a thread, since files are read."""

        async def respond(request: Request) -> Response:
            session = await self._signed_in(request)
            return _json(await asyncio.to_thread(answer, request, session))

        return self._guarded(respond)

    def _acting(self, body_type: Any, act: Callable[[Session, Any], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Answer a request that changes something: of this page's own script, with the session's secret."""

        async def respond(request: Request) -> Response:
            session = await self._signed_in(request)
            self._check_origin(request)
            if not hmac.compare_digest(request.headers.get("atoll-csrf", "").encode(), session.csrf.encode()):
                raise Refused(HTTPStatus.FORBIDDEN, "this request does not come from the page: load it again")
            body = await _body(request, body_type)
            return _json(await asyncio.to_thread(act, session, body))

        return self._guarded(respond)

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin", "")
        own = f"{request.url.scheme}://{request.headers['host']}"
        site = request.headers.get("sec-fetch-site", "same-origin")
        if origin not in ("", own) or site not in ("same-origin", "none"):
            raise Refused(HTTPStatus.FORBIDDEN, "another site sent this request: open the page's own link")

    async def _signed_in(self, request: Request) -> Session:
        session = await asyncio.to_thread(self._access.session, request.cookies.get(_cookie_name(request), ""))
        request.scope["extensions"][CONNECTION].authenticate(f"page {session.id}")
        return session

    # ---- sessions

    async def _session(self, request: Request) -> Response:
        if request.method == "GET":
            return _json(self._described(await self._signed_in(request)))
        self._check_origin(request)
        address = request.client.host if request.client else ""
        self._guesses.check(address)
        body = await _body(request, SignIn)
        try:
            cookie, session = await asyncio.to_thread(self._access.sign_in, body.token)
        except Refused:
            self._guesses.wrong(address)
            raise
        response = _json(self._described(session))
        response.set_cookie(
            _cookie_name(request),
            cookie,
            max_age=max(0, int(session.expires - time.time())),
            path="/ui",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    def _described(self, session: Session) -> Json:
        return {
            "role": session.role.value,
            "name": session.name,
            "csrf": session.csrf,
            "expires": _iso(session.expires),
            "kind": self._served.kind,
            "title": self._title,
            "version": version("atoll"),
            "can": list(self._actions) if session.role is Role.OPERATOR else [],
        }

    def _end(self, session: Session, body: None) -> Json:
        self._access.end(session)
        return {}

    # ---- what is shown

    async def _static(self, name: str, request: Request) -> Response:
        data = files("atoll.ui").joinpath("static", name).read_bytes()
        tag = f'"{sha256(data).hexdigest()[:32]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(data, media_type=STATIC[name], headers=headers)

    def _run(self, run: str) -> Json:
        summary = self._runs.summaries().get(run)
        if summary is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no run {run!r:.80} here: go back to the list of runs")
        return self._runs.document(run, summary)

    def _rows(self, request: Request, session: Session) -> Json:
        run, most = request.query_params.get("id", ""), request.query_params.get("most", str(MAX_ROWS))
        if not (most.isascii() and most.isdigit() and 0 < int(most) <= 100_000):
            raise Refused(HTTPStatus.BAD_REQUEST, f"most must be a number of 1 to 100000, got {most!r:.20}")
        return {"id": run, **self._runs.rows(run).table(int(most))}

    def _ledger_lines(self, run: str) -> list[str]:
        if run != OPERATOR:
            return self._runs.ledger(run)
        return self._served.operator_ledger() or []

    def _ledger(self, request: Request, session: Session) -> Json:
        first = request.query_params.get("from", "0")
        start = int(first) if first.isascii() and first.isdigit() else 0
        return ledger_page(self._ledger_lines(request.query_params.get("id", "")), start)

    def _verify(self, session: Session, body: Named) -> Json:
        started = time.monotonic()
        lines = self._ledger_lines(body.id)
        fault = verified(lines, is_operator=body.id == OPERATOR)
        text = f"record {fault.number} {fault.what}" if isinstance(fault, Fault) else None
        return {"ok": text is None, "length": len(lines), "fault": text, "seconds": time.monotonic() - started}

    def _clients(self, request: Request, session: Session) -> msgspec.Raw:
        clients = self._feed.clients()
        if clients is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there are no clients of a federation here")
        return msgspec.Raw(clients)

    async def _file(self, request: Request) -> Response:
        await self._signed_in(request)
        run, name = request.query_params.get("id", ""), request.query_params.get("name", "")
        if name == "metrics.csv":
            log = await asyncio.to_thread(self._runs.rows, run)
            text = csv_text([msgspec.json.decode(line) for line in log.lines])
            return _download(text.encode(), f"{run.replace('/', '-')}.csv", "text/csv")
        data = await asyncio.to_thread(self._runs.file, run, name)
        if name.endswith(".html"):
            return Response(data, media_type="text/html", headers={"content-security-policy": SANDBOX})
        return _download(data, f"{run.replace('/', '-')}-{name}", "text/plain")

    async def _stream(self, request: Request) -> Response:
        cookie = request.cookies.get(_cookie_name(request), "")
        await self._signed_in(request)
        follow = request.query_params.getlist("follow")[:MAX_FOLLOWED]
        page = Subscription(follow, read_marker(request.headers.get("last-event-id", "")))

        def alive() -> str:
            try:
                self._access.session(cookie)
            except AtollError as error:
                return str(error)
            return ""

        return StreamingResponse(_started(self._feed.messages(page, alive)), media_type="text/event-stream")

    # ---- what operators do

    def _act(self, name: str, session: Session, body: Any) -> Any:
        session.require(Role.OPERATOR)
        try:
            return self._actions[name].do(body, session.name)
        finally:
            self._feed.forget_clients()

    def _tokens(self, request: Request, session: Session) -> Json:
        session.require(Role.OPERATOR)
        times = ("created", "expires", "used")
        tokens = [plain_token(token) for token in self._access.tokens()]
        return {"tokens": [{**each, **{name: _iso(each[name]) for name in times}} for each in tokens]}

    def _access_add(self, body: NewAccess, by: str) -> Json:
        text, token = self._served.give_access(body.name, Role(body.role), body.hours, by)
        return {"link": f"/ui/#token={text}", "id": token.id}

    def _access_revoke(self, body: Named, by: str) -> Json:
        self._served.revoke_access(body.id, by)
        return {}


def _cookie_name(request: Request) -> str:
    """Return the cookie's name, with the port: browsers send cookies to all ports of a name."""
    return f"atoll_session_{request.headers['host'].rpartition(':')[2]}"


async def _started(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Send something at once, so that the page knows that it is connected."""
    yield b"retry: 1000\n\n"
    async for message in messages:
        yield message


async def _body(request: Request, body_type: Any) -> Any:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, with content-type: application/json")
    data = await read_body(request.receive, content_length(dict(request.headers), MAX_BODY))
    return None if body_type is None else msgspec.json.decode(data or b"{}", type=body_type)


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _download(data: bytes, name: str, kind: str) -> Response:
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.=") else "-" for letter in name)
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{safe}"'})


def _problem(error: Exception) -> Response:
    status, headers = HTTPStatus.BAD_REQUEST, dict[str, str]()
    if isinstance(error, Refused):
        status = error.status
        headers = {} if error.retry is None else {"retry-after": str(int(error.retry) + 1)}
    elif isinstance(error, TooLarge):
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    content = msgspec.json.encode({"error": str(error)})
    return Response(content, status, headers, media_type="application/json")


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
