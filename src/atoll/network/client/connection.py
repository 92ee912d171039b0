"""A client's line to its server: signed requests that are made until they are answered, and objects in chunks."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import AtollError, RunError
from atoll.network.protocol.identity import Stamp, client_id, enrolment, public_bytes, session_request, sign
from atoll.network.protocol.messages import (
    MAX_CONTROL,
    METADATA_HEADER,
    TASK,
    VERSION,
    VERSION_HEADER,
    About,
    Answer,
    Challenge,
    Delivered,
    Delivery,
    Enrol,
    Enrolled,
    Hello,
    Message,
    Missing,
    Nonce,
    Problem,
    Ref,
    Welcome,
    read_message,
)
from atoll.network.protocol.objects import CHUNK, HASH, Manifest, ObjectError, Objects, cut, manifest_of, read_manifest

A = TypeVar("A", bound=Message)
T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before something is tried again: the pause doubles each time, and a random part of it is waited."""
CONNECT_SECONDS, ANSWER_SECONDS = 20.0, 60.0
NO_HEADERS: Mapping[str, str] = {}
SENDINGS = 3
"""How often chunks are sent that the server says it still misses."""


class Declined(AtollError):
    """A request that the server does not serve, and will not if it is made again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RetryLater(Exception):
    """What may work if it is tried again: after some seconds if the server says so, else after a growing pause."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


def tls_context(
    authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.3 with certificates that are checked; with a certificate of one's own where the server asks for one."""
    try:
        context = ssl.create_default_context(cafile=authority)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise RunError(f"the certificates cannot be used ({error}): check --ca, --cert and --key") from error
    return context


class Connection:
    """Speaks to one server as one client. Requests are made until they are answered, however long that takes."""

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
        self._key, self._server_key, self._say, self._sleep, self._keep_trying = (
            key,
            server_key,
            say,
            sleep,
            keep_trying,
        )
        self._welcome: Welcome | None = None
        self._counter, self._ahead = 0, 0.0
        url = _checked(url)
        self._http = httpx2.Client(
            base_url=url,
            verify=tls or (url.startswith("https") and tls_context()),
            headers={VERSION_HEADER: str(VERSION), "accept-encoding": "identity"},
            limits=httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def about(self) -> About:
        """What anybody may know of the server."""
        return self._retry(self._about)

    def enrol(self, token: str, name: str) -> str:
        """Become known to the server; the client's id."""
        key = public_bytes(self._key)
        body = Enrol(token, name, key, self._key.sign(enrolment(token, name, key)))
        return self._retry(lambda: self._ask_unsigned("POST", "/v1/enrol", Enrolled, body)).client

    def welcome(self) -> Welcome:
        """Who this client is to the server; begins a session if there is none."""
        return self._retry(self._session)

    def ask(self, method: str, path: str, answer: type[A], body: Message | None = None, wait: float = 0.0) -> A:
        """Make a signed request, whose answer may take `wait` seconds; Declined if the server refuses it for good."""
        data = b"" if body is None else msgspec.json.encode(body)
        return self._retry(lambda: _read(self._ask_signed(method, path, data, MAX_CONTROL, wait), answer))

    def ask_once(self, method: str, path: str, body: Message) -> None:
        """Make a signed request once, whether it is heard or not."""
        with suppress(httpx2.TransportError, RetryLater, AtollError):
            self._ask_signed(method, path, msgspec.json.encode(body), MAX_CONTROL)

    def download(self, run: str, ref: Ref, objects: Objects) -> bool:
        """Get an object, without the chunks that are here already, and say whether none was.

        Each is checked as it arrives."""
        path = f"/v1/runs/{run}/objects/{ref.name}"
        manifest = read_manifest(self._fetch(path, _manifest_bytes(ref.num_bytes)), ref.num_bytes)
        if manifest.name() != ref.name or manifest.num_bytes != ref.num_bytes:
            raise ObjectError(f"the server sent another object than {ref.name}: tell the operator")
        missing = set(objects.missing(manifest))
        none_here = len(missing) == len(set(manifest.chunks))
        for index, (digest, size) in enumerate(zip(manifest.chunks, manifest.sizes(), strict=True)):
            if digest in missing:
                objects.put_chunk(digest, self._fetch(f"{path}/{index}", size))
                missing.discard(digest)
        objects.put_manifest(manifest)
        return none_here

    def deliver(self, run: str, attempt: int, data: bytes | memoryview, told: Delivery) -> Delivered:
        """Deliver an update: a small one in one request, a larger one in the chunks that the server does not have."""
        path = f"{TASK.format(run=run, attempt=attempt)}/update"
        if len(data) > CHUNK:
            self.upload(run, attempt, data)
            return self.ask("POST", path, Delivered, told)
        whole, header = bytes(data), {METADATA_HEADER: msgspec.json.encode(told).decode()}
        return self._retry(lambda: _read(self._ask_signed("PUT", path, whole, MAX_CONTROL, more=header), Delivered))

    def upload(self, run: str, attempt: int, data: bytes | memoryview) -> Manifest:
        """Send the chunks of an object that the server does not have; the object's manifest."""
        path, manifest = TASK.format(run=run, attempt=attempt), manifest_of(data)
        announced = Answer(msgspec.msgpack.encode(manifest))
        chunks = dict(zip((digest.hex() for digest in manifest.chunks), cut(data), strict=True))
        for _ in range(SENDINGS):
            wanted = self.ask("POST", f"{path}/missing", Missing, announced).chunks
            if not wanted:
                break
            for name in dict.fromkeys(wanted):
                if name not in chunks:
                    raise ObjectError("the server asks for a chunk that is not of this update: tell the operator")
                chunk = bytes(chunks[name])
                self._retry(partial(self._ask_signed, "PUT", f"{path}/chunks/{name}", chunk, MAX_CONTROL))
        return manifest

    def _fetch(self, path: str, most: int) -> bytes:
        return self._retry(lambda: self._ask_signed("GET", path, b"", max(most, MAX_CONTROL)))

    def _retry(self, work: Callable[[], T]) -> T:
        """Do something until it works; who is not patient learns why it does not."""
        failures, told, prompt = 0, "", True
        while True:
            try:
                return work()
            except httpx2.TransportError as error:
                why, seconds, prompt = f"the server cannot be reached ({error or type(error).__name__})", None, True
            except RetryLater as later:
                why, seconds = str(later), later.seconds
            if not self._keep_trying:
                raise RunError(f"{why}: check the address, or try again later")
            if seconds == 0 and prompt:  # what is to be tried again at once is, but only once while the server answers
                prompt = False
                continue
            if why != told:
                self._say(f"{why}; trying again")
                told = why
            pause = min(FIRST_PAUSE * 2.0 ** min(failures, 10), LONGEST_PAUSE)
            self._sleep((seconds or 0.0) + random.uniform(0, pause))  # noqa: S311
            failures += 1

    def _session(self) -> Welcome:
        """The session, or a new one, with the server's own clock."""
        if self._welcome is None:
            about = self._about()
            self._ahead = about.time - time.monotonic()  # no matter when a clock is set
            nonce = self._ask_unsigned("POST", "/v1/challenge", Nonce, Challenge(self.client)).nonce
            hello = Hello(self.client, nonce, self._key.sign(session_request(self.client, nonce)))
            self._welcome, self._counter = self._ask_unsigned("POST", "/v1/session", Welcome, hello), 0
        return self._welcome

    def _about(self) -> About:
        found = self._ask_unsigned("GET", "/v1/about", About)
        if VERSION not in found.protocols:
            spoken = ", ".join(map(str, found.protocols))
            raise RunError(f"the server speaks version {spoken} of the protocol, this Atoll {VERSION}: update one")
        if self._server_key not in (None, found.server_key):
            raise RunError(
                "the server has another key than when this client enrolled: it is another server; ask the operator, "
                "and enrol again with another --home if it is meant to be"
            )
        return found

    def _ask_unsigned(self, method: str, path: str, answer: type[A], body: Message | None = None) -> A:
        """A request that needs no session, made once."""
        data = b"" if body is None else msgspec.json.encode(body)
        status, found = self._exchange(method, path, data, {}, MAX_CONTROL)
        if status == HTTPStatus.OK:
            return _read(found, answer)
        problem = _problem(status, found)
        if problem.retry is not None or _passes(status):
            raise RetryLater(problem.error, problem.retry)
        raise RunError(problem.error)

    def _ask_signed(
        self, method: str, path: str, body: bytes, most: int, wait: float = 0.0, more: Mapping[str, str] = NO_HEADERS
    ) -> bytes:
        """A request within the session, made once; it is counted and signed anew whenever it is made again."""
        epoch = self._session().epoch
        self._counter += 1
        stamp = Stamp(self.client, epoch, self._counter, int(time.monotonic() + self._ahead))
        headers = sign(self._key, stamp, method, path, body).headers()
        status, found = self._exchange(method, path, body, {**headers, **more}, most, wait)
        if status == HTTPStatus.OK:
            return found
        problem = _problem(status, found)
        if status == HTTPStatus.UNAUTHORIZED:
            self._welcome = None
            raise RetryLater(problem.error, problem.retry or 0.0)
        if problem.retry is not None or _passes(status):
            raise RetryLater(problem.error, problem.retry)
        if status in (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.UPGRADE_REQUIRED):
            raise RunError(problem.error)
        raise Declined(status, problem.error)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str], most: int, wait: float = 0.0
    ) -> tuple[int, bytes]:
        """Status and body of an answer; no more than `most` bytes of it are read."""
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=ANSWER_SECONDS + wait)
        with self._http.stream(method, path, content=body, headers=headers, timeout=timeout) as response:
            parts, total = [], 0
            for part in response.iter_raw():
                total += len(part)
                if total > most:
                    raise ObjectError(f"the server answers {path} with more than {most:,} bytes: tell the operator")
                parts.append(part)
            return response.status_code, b"".join(parts)


def _checked(url: str) -> str:
    """The address of a server; without TLS it must be on this machine."""
    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise RunError(f"the server's address begins with https://, got {url!r}; http:// is for this machine only")
    return url.rstrip("/")


def _manifest_bytes(num_bytes: int) -> int:
    """The most bytes that the manifest of such an object takes."""
    return 64 + (HASH + 2) * (-(-num_bytes // (1 << 20)) + 1)


def _passes(status: int) -> bool:
    """Whether a problem may go away by itself."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _read(data: bytes, kind: type[A]) -> A:
    try:
        return read_message(data, kind)
    except msgspec.MsgspecError as error:
        raise RetryLater(f"the server's answer is not understood ({error})") from error


def _problem(status: int, data: bytes) -> Problem:
    """What is wrong, in the server's words; something between the two may have spoken instead."""
    try:
        return msgspec.json.decode(data, type=Problem)
    except msgspec.MsgspecError:
        return Problem(f"the server answers with {status}: check its address")
