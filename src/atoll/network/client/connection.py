"""Requests of a client to its server: signed, retried until they are answered, with objects in chunks."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import AtollError, RunError
from atoll.network.protocol import endpoints
from atoll.network.protocol.endpoints import MAX_CONTROL, METADATA_HEADER, Body, Endpoint, Reply
from atoll.network.protocol.identity import Stamp, client_id, enrolment, public_bytes, session_request, sign
from atoll.network.protocol.messages import (
    VERSION,
    VERSION_HEADER,
    About,
    Answer,
    Challenge,
    Delivered,
    Delivery,
    Enrol,
    Hello,
    Message,
    Problem,
    Ref,
    Welcome,
    read_message,
)
from atoll.network.protocol.objects import (
    CHUNK,
    Manifest,
    ObjectError,
    Objects,
    cut,
    manifest_of,
    max_manifest_bytes,
    read_manifest,
)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a retry: the pause doubles each time, and a random part of it is waited."""
CONNECT_SECONDS, ANSWER_SECONDS = 20.0, 60.0
LANES = 12
"""Requests of a session that may be on their way at once; a server allows a client 16 connections."""
MAX_UPLOADS = 3
"""How often chunks are sent that the server says are missing."""


class Declined(AtollError):
    """A request that the server refuses for good."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RetryLater(Exception):
    """A failure that may pass: retry after `seconds` if the server gives them, else after a growing pause."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


def tls_context(
    authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Make a context of TLS 1.3 that checks certificates, with an own one where the server asks for it."""
    try:
        context = ssl.create_default_context(cafile=authority)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise RunError(f"the certificates cannot be used ({error}): check --ca, --cert and --key") from error
    return context


class Connection:
    """A client's connection to one server; requests are retried until they are answered, however long that takes."""

    def __init__(
        self,
        url: str,
        key: Ed25519PrivateKey,
        tls: ssl.SSLContext | None = None,
        *,
        server_key: bytes | None = None,
        say: Callable[[str], None] = print,
        sleep: Callable[[float], None] = time.sleep,
        keep_trying: bool = True,
    ) -> None:
        self.client = client_id(public_bytes(key))
        self._key, self._server_key = key, server_key
        self._say, self._sleep, self._keep_trying = say, sleep, keep_trying
        self._welcome: Welcome | None = None
        self._counter, self._ahead = 0, 0.0
        self._lock = threading.RLock()
        """Held while a session begins or a counter is taken: several threads may ask."""
        url = _checked(url)
        self._http = httpx2.Client(
            base_url=url,
            verify=tls or (url.startswith("https") and tls_context()),
            headers={VERSION_HEADER: str(VERSION), "accept-encoding": "identity"},
            limits=httpx2.Limits(max_connections=1 + LANES, max_keepalive_connections=1 + LANES, keepalive_expiry=60),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def about(self) -> About:
        """Return the public facts about the server."""
        return self._retry(self._about)

    def enrol(self, token: str, name: str) -> str:
        """Enrol this client with a token; return its id."""
        key = public_bytes(self._key)
        body = Enrol(token, name, key, self._key.sign(enrolment(token, name, key)))
        return self._retry(lambda: self._ask_public(endpoints.ENROL, body)).client

    def welcome(self) -> Welcome:
        """Return who this client is to the server; begin a session if there is none."""
        return self._retry(self._session)

    def ask(
        self,
        endpoint: Endpoint[Body, Reply],
        body: Body,
        *,
        wait: float = 0.0,
        metadata: Message | None = None,
        **parameters: str | int,
    ) -> Reply:
        """Make a signed request until it is answered; Declined if the server refuses it for good.

        The answer may take `wait` seconds; `parameters` are those of the endpoint's path.
        """
        call = _call(endpoint, body, metadata, **parameters)
        return self._retry(lambda: self._ask_signed(call, wait))

    def ask_once(self, endpoint: Endpoint[Body, Reply], body: Body, **parameters: str | int) -> None:
        """Make a signed request once, whether it succeeds or not."""
        with suppress(httpx2.TransportError, RetryLater, AtollError):
            self._ask_signed(_call(endpoint, body, None, **parameters))

    def download(self, run: str, ref: Ref, objects: Objects) -> bool:
        """Fetch the chunks of an object that are missing here, check each, and return whether all were missing."""
        largest = max(max_manifest_bytes(ref.num_bytes), MAX_CONTROL)
        call = _call(endpoints.MANIFEST, None, None, run=run, name=ref.name)._replace(max_answer=largest)
        manifest = read_manifest(self._retry(lambda: self._ask_signed(call)), ref.num_bytes)
        if manifest.name() != ref.name or manifest.num_bytes != ref.num_bytes:
            raise ObjectError(f"the server sent another object than {ref.name}: tell the operator")
        missing = set(objects.missing(manifest))
        none_here = len(missing) == len(set(manifest.chunks))
        for index, digest in enumerate(manifest.chunks):
            if digest in missing:
                objects.put_chunk(digest, self.ask(endpoints.GET_CHUNK, None, run=run, name=ref.name, index=index))
                missing.discard(digest)
        objects.put_manifest(manifest)
        return none_here

    def fetch(self, run: str, ref: Ref, objects: Objects) -> Iterator[bytes]:
        """Download an object and read it; fetch it again if a loss of power damaged what is stored here."""
        if not self.download(run, ref, objects) and not objects.is_sound(ref.name):
            objects.keep_only(())
            self.download(run, ref, objects)
        return objects.read(ref.name)

    def deliver(self, run: str, attempt: int, data: bytes | memoryview, delivery: Delivery) -> Delivered:
        """Deliver an update: a small one in one request, a larger one in the chunks that the server does not have."""
        if len(data) > CHUNK:
            self.upload(run, attempt, data)
            return self.ask(endpoints.UPDATE, delivery, run=run, attempt=attempt)
        return self.ask(endpoints.PUT_UPDATE, bytes(data), metadata=delivery, run=run, attempt=attempt)

    def upload(self, run: str, attempt: int, data: bytes | memoryview) -> Manifest:
        """Send the chunks of an object that the server does not have; return the object's manifest."""
        manifest = manifest_of(data)
        announced = Answer(msgspec.msgpack.encode(manifest))
        chunks = dict(zip((digest.hex() for digest in manifest.chunks), cut(data), strict=True))
        for _ in range(MAX_UPLOADS):
            wanted = self.ask(endpoints.MISSING, announced, run=run, attempt=attempt).chunks
            if not wanted:
                break
            for digest in dict.fromkeys(wanted):
                if digest not in chunks:
                    raise ObjectError("the server asks for a chunk that is not of this update: tell the operator")
                self.ask(endpoints.PUT_CHUNK, bytes(chunks[digest]), run=run, attempt=attempt, digest=digest)
        return manifest

    def _retry(self, work: Callable[[], T]) -> T:
        """Do work until it succeeds; without `keep_trying`, raise its first failure."""
        failures, reported, prompt = 0, "", True
        while True:
            try:
                return work()
            except httpx2.TransportError as error:
                why, seconds, prompt = f"the server cannot be reached ({error or type(error).__name__})", None, True
            except RetryLater as later:
                why, seconds = str(later), later.seconds
            if not self._keep_trying:
                raise RunError(f"{why}: check the address, or try again later")
            if seconds == 0 and prompt:  # at once, but only once while the server answers
                prompt = False
                continue
            if why != reported:
                self._say(f"{why}; trying again")
                reported = why
            pause = min(FIRST_PAUSE * 2.0 ** min(failures, 10), LONGEST_PAUSE)
            self._sleep((seconds or 0.0) + random.uniform(0, pause))  # noqa: S311
            failures += 1

    def _session(self) -> Welcome:
        """Return the session; without one, begin it by the server's clock."""
        with self._lock:
            if self._welcome is None:
                about = self._about()
                self._ahead = about.time - time.monotonic()  # nobody sets a monotonic clock
                nonce = self._ask_public(endpoints.CHALLENGE, Challenge(self.client)).nonce
                hello = Hello(self.client, nonce, self._key.sign(session_request(self.client, nonce)))
                self._welcome, self._counter = self._ask_public(endpoints.SESSION, hello), 0
            return self._welcome

    def _about(self) -> About:
        about = self._ask_public(endpoints.ABOUT, None)
        if VERSION not in about.protocols:
            spoken = ", ".join(map(str, about.protocols))
            raise RunError(f"the server speaks version {spoken} of the protocol, this Atoll {VERSION}: update one")
        if self._server_key not in (None, about.server_key):
            raise RunError(
                "the server has another key than when this client enrolled: it is another server; ask the operator, "
                "and enrol again with another --home if it is meant to be"
            )
        return about

    def _ask_public(self, endpoint: Endpoint[Body, Reply], body: Body) -> Reply:
        """Make a request that needs no session, once."""
        call = _call(endpoint, body, None)
        status, data = self._exchange(call, {})
        if status == HTTPStatus.OK:
            return _parse(data, endpoint.answer)
        problem = _problem(status, data)
        if problem.retry is not None or _may_pass(status):
            raise RetryLater(problem.error, problem.retry)
        raise RunError(problem.error)

    def _ask_signed(self, call: _Call[Reply], wait: float = 0.0) -> Reply:
        """Make a request within the session, once; each time it gets a counter and a signature of its own."""
        with self._lock:
            epoch = self._session().epoch
            self._counter += 1
            now = int(time.monotonic() + self._ahead)
            stamp = Stamp(client=self.client, epoch=epoch, counter=self._counter, time=now)
        status, data = self._exchange(call, sign(self._key, stamp, call.method, call.url, call.body).headers(), wait)
        if status == HTTPStatus.OK:
            return _parse(data, call.answer)
        problem = _problem(status, data)
        with self._lock:
            is_newest = self._welcome is not None and self._welcome.epoch == epoch
            if status == HTTPStatus.UNAUTHORIZED and is_newest:
                self._welcome = None
        if status == HTTPStatus.UNAUTHORIZED or (status == HTTPStatus.CONFLICT and not is_newest):
            raise RetryLater(problem.error, problem.retry or 0.0)  # another thread may have begun a session since
        if problem.retry is not None or _may_pass(status):
            raise RetryLater(problem.error, problem.retry)
        if status in (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.UPGRADE_REQUIRED):
            raise RunError(problem.error)
        raise Declined(status, problem.error)

    def _exchange(self, call: _Call[Any], headers: dict[str, str], wait: float = 0.0) -> tuple[int, bytes]:
        """Send a request; return status and body of the answer, of which no more than allowed is read."""
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=ANSWER_SECONDS + wait)
        sent: dict[str, Any] = {"content": call.body, "headers": {**headers, **call.headers}, "timeout": timeout}
        with self._http.stream(call.method, call.url, **sent) as response:
            parts, total = [], 0
            for part in response.iter_raw():
                total += len(part)
                if total > call.max_answer:
                    raise ObjectError(
                        f"the server answers {call.url} with more than {call.max_answer:,} bytes: tell the operator"
                    )
                parts.append(part)
            return response.status_code, b"".join(parts)


class _Call(NamedTuple, Generic[Reply]):
    """A request as it travels, but for its signature."""

    method: str
    url: str
    body: bytes
    headers: Mapping[str, str]
    answer: type[Reply]
    max_answer: int


def _call(
    endpoint: Endpoint[Body, Reply], body: Body, metadata: Message | None, **parameters: str | int
) -> _Call[Reply]:
    data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    return _Call(
        method=endpoint.method,
        url=endpoint.url(**parameters),
        body=data,
        headers={} if metadata is None else {METADATA_HEADER: msgspec.json.encode(metadata).decode()},
        answer=endpoint.answer,
        max_answer=endpoint.max_answer,
    )


def _checked(url: str) -> str:
    """Check the address of a server: without TLS it must be on this machine."""
    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise RunError(f"the server's address begins with https://, got {url!r}; http:// is for this machine only")
    return url.rstrip("/")


def _may_pass(status: int) -> bool:
    """Return whether a problem may pass by itself."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _parse(data: bytes, kind: type[Reply]) -> Reply:
    expected: Any = kind
    try:
        answer: Any = data if expected is bytes else read_message(data, expected)
    except msgspec.MsgspecError as error:
        raise RetryLater(f"the server's answer is not understood ({error})") from error
    parsed: Reply = answer
    return parsed


def _problem(status: int, data: bytes) -> Problem:
    """Read the problem that the server describes; a proxy may have answered instead."""
    try:
        return msgspec.json.decode(data, type=Problem)
    except msgspec.MsgspecError:
        return Problem(f"the server answers with {status}: check its address")
