"""Access to the live page: tokens with a role, sessions of browsers, and a limit of guesses.

A token is shown once and kept as a hash. It opens one browser only, unless it is for this machine, so that a link that
was used is worth nothing to a thief. A session is a signed cookie: it outlives a restart of the server, and ends with
its token.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import RunError
from atoll.network.protocol.identity import check_private, token_hash
from atoll.network.server.auth import Refused

FILE = ".access.json"
MAX_SECONDS = 366 * 86400.0
"""Longest life of a token."""
GUESS_SECONDS, MAX_GUESSES, MAX_ALL_GUESSES = 60.0, 20, 200
"""Wrong tokens in this time that one address, and all together, may try."""


class Role(StrEnum):
    """What a session may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class AccessToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token as it is kept; times are seconds since 1970."""

    id: str
    name: str
    role: Role
    hash: str
    created: float
    expires: float
    used: float | None = None
    """When a browser was opened with it."""
    reusable: bool = False
    """Whether it opens further browsers."""


class _Contents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    key: str
    """Signs sessions, in hexadecimal digits."""
    tokens: list[AccessToken] = []
    ended: dict[str, float] = {}
    """Sessions that were ended by their users, until they would have expired."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A browser that has signed in."""

    id: str
    token: str
    """Id of the token that it was opened with."""
    name: str
    role: Role
    expires: float
    csrf: str
    """Sent in a header with every action, which pages of other origins cannot know."""

    def require(self, role: Role) -> None:
        """Refuse what needs another role."""
        if role is Role.OPERATOR and self.role is not Role.OPERATOR:
            raise Refused(HTTPStatus.FORBIDDEN, f"{self.name} may look on: ask for a link with the role operator")


class Access:
    """The tokens and sessions in a file; commands and servers may change it at the same time."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = directory / FILE, clock
        self._lock = threading.Lock()
        self._cached: tuple[tuple[int, int, int], _Contents] | None = None

    def add(self, name: str, role: Role, seconds: float, *, reusable: bool = False) -> tuple[str, AccessToken]:
        """Make a token; return its text, which is kept nowhere, and what is kept of it."""
        if not 0 < seconds <= MAX_SECONDS:
            raise RunError(f"a token lives for at most a year, got {seconds:g} seconds: choose fewer hours")
        if not (0 < len(name) <= 80 and name.isprintable()):
            raise RunError(f"a token is named by 1 to 80 printable characters, got {name!r:.100}: say whose it is")
        text, now = secrets.token_urlsafe(32), self._clock()
        token = AccessToken(
            id=secrets.token_hex(4),
            name=name,
            role=role,
            hash=token_hash(text),
            created=now,
            expires=now + seconds,
            reusable=reusable,
        )
        with self._change() as contents:
            contents.tokens = [*(each for each in contents.tokens if each.expires > now), token]
        return text, token

    def revoke(self, token_id: str) -> AccessToken:
        """Remove a token, which ends its sessions."""
        with self._change() as contents:
            found = next((each for each in contents.tokens if each.id == token_id), None)
            if found is None:
                raise RunError(f"there is no token {token_id!r:.40}: see atoll access list")
            contents.tokens.remove(found)
        return found

    def tokens(self) -> list[AccessToken]:
        """Return the tokens that have not expired."""
        return [each for each in self._read().tokens if each.expires > self._clock()]

    def sign_in(self, text: str) -> tuple[str, Session]:
        """Exchange a token for a new session; return its cookie. A wrong, expired or used token is refused."""
        digest, now = token_hash(text), self._clock()
        with self._change() as contents:
            place = next((n for n, each in enumerate(contents.tokens) if each.hash == digest), None)
            token = contents.tokens[place] if place is not None else None
            if place is None or token is None or token.expires <= now:
                raise Refused(HTTPStatus.UNAUTHORIZED, "this token is wrong or has expired: ask for another link")
            if token.used is not None and not token.reusable:
                raise Refused(
                    HTTPStatus.UNAUTHORIZED,
                    "this link was used before, and opens one browser only: if that was not you, let it be revoked; "
                    "ask for another",
                )
            contents.tokens[place] = msgspec.structs.replace(token, used=token.used or now)
            key = bytes.fromhex(contents.key)
        payload = json.dumps([token.id, secrets.token_hex(16), token.expires]).encode()
        cookie = f"{_text(payload)}.{_text(_mac(key, b'session', payload))}"
        return cookie, self._session(key, token, payload)

    def session(self, cookie: str) -> Session:
        """Return the session of a cookie; refuse one that was changed, has expired, ended or lost its token."""
        contents, now = self._read(), self._clock()
        key = bytes.fromhex(contents.key)
        try:
            payload, mac = (base64.urlsafe_b64decode(part + "==") for part in cookie.split("."))
        except ValueError:
            payload, mac = b"", b""
        if not hmac.compare_digest(mac, _mac(key, b"session", payload)):
            raise Refused(HTTPStatus.UNAUTHORIZED, "sign in: open the link with its token")
        token_id, session_id, expires = json.loads(payload)
        token = next((each for each in contents.tokens if each.id == token_id), None)
        if token is None or session_id in contents.ended or min(expires, token.expires) <= now:
            raise Refused(HTTPStatus.UNAUTHORIZED, "this session has ended: open a new link")
        return self._session(key, token, payload)

    def end(self, session: Session) -> None:
        """End a session."""
        now = self._clock()
        with self._change() as contents:
            contents.ended = {each: until for each, until in contents.ended.items() if until > now}
            contents.ended[session.id] = session.expires

    def _session(self, key: bytes, token: AccessToken, payload: bytes) -> Session:
        _, session_id, expires = json.loads(payload)
        csrf = _text(_mac(key, b"csrf", session_id.encode()))
        return Session(
            id=session_id,
            token=token.id,
            name=token.name,
            role=token.role,
            expires=min(expires, token.expires),
            csrf=csrf,
        )

    def _read(self) -> _Contents:
        """Return what the file holds; it is read again only after a change."""
        with self._lock:
            try:
                status = self._path.stat()
            except FileNotFoundError:
                with self._change_locked():
                    pass
                status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._cached is None or self._cached[0] != stamp:
                self._cached = (stamp, self._load())
            return self._cached[1]

    @contextlib.contextmanager
    def _change(self) -> Iterator[_Contents]:
        with self._lock, self._change_locked() as contents:
            yield contents

    @contextlib.contextmanager
    def _change_locked(self) -> Iterator[_Contents]:
        """Change what the file holds, alone; what raises leaves it as it was."""
        beside = self._path.with_name(f"{FILE}.new")
        with self._path.with_name(f"{FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            contents = self._load() if self._path.exists() else _Contents(key=secrets.token_hex(32))
            yield contents
            beside.unlink(missing_ok=True)
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(contents))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)

    def _load(self) -> _Contents:
        check_private(self._path)
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Contents)
        except msgspec.MsgspecError as error:
            raise RunError(f"{self._path} is damaged ({error}): remove it, and make new links") from error


class GuessLimit:
    """Counts wrong tokens by address, and refuses further tries for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._wrong = clock, deque[tuple[float, str]]()

    def check(self, address: str) -> None:
        """Refuse an address that has tried too often, before its token is looked at."""
        now = self._clock()
        while self._wrong and self._wrong[0][0] <= now - GUESS_SECONDS:
            self._wrong.popleft()
        times = [when for when, whose in self._wrong if whose == address]
        if len(times) >= MAX_GUESSES or len(self._wrong) >= MAX_ALL_GUESSES:
            wait = (times or [self._wrong[0][0]])[0] + GUESS_SECONDS - now
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "too many wrong tokens: wait a minute, then try again", wait)

    def wrong(self, address: str) -> None:
        """Count a wrong token."""
        self._wrong.append((self._clock(), address))


def _mac(key: bytes, use: bytes, data: bytes) -> bytes:
    return hmac.digest(key, b"atoll page 1 " + use + b" " + data, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def plain_token(token: AccessToken) -> dict[str, Any]:
    """Return a token as it is listed: without its hash."""
    named = msgspec.to_builtins(token)
    return {name: value for name, value in named.items() if name != "hash"}
