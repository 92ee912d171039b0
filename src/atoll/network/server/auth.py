"""Enrolment, sessions and authentication of clients, with protection against replay; and the clocks of a server."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from atoll.core.errors import AtollError
from atoll.network.protocol.identity import (
    MAX_AGE,
    CounterWindow,
    Stamp,
    client_id,
    enrolment,
    holds,
    session_request,
    signed_by,
    token_hash,
)
from atoll.network.server.store import Store
from atoll.network.server.tables import ClientRow, Status

NONCE_SECONDS = 60
"""Seconds in which a client must answer a challenge."""
SESSIONS, SESSION_SECONDS = 20, 1.0
"""Sessions that a client may begin at once, as each is written to the store; and seconds until one more."""
MAX_NAME = 100
APPROVAL_SECONDS = 10.0
"""Seconds after which a client that waits for approval asks again."""
SHUT_OUT = "this client was shut out: ask the operator why"


class Clock(NamedTuple):
    """A wall clock and a monotonic clock."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970: for display, and for times that outlive a restart. It may be set at any moment."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds since some moment: for pauses, deadlines and ages. It is never set, and never stored."""

    def steady(self) -> Callable[[], float]:
        """Return a clock that starts at the wall clock's time and is never set."""
        start = self.wall() - self.monotonic()
        return lambda: start + self.monotonic()


SYSTEM = Clock()


class Refused(AtollError):
    """A refused request, with the status of HTTP and, if a retry may help, the seconds until then."""

    def __init__(self, status: HTTPStatus, text: str, retry: float | None = None) -> None:
        super().__init__(text)
        self.status, self.retry = status, retry


class Authenticator:
    """Authenticates approved clients. Sessions are kept in memory: after a restart clients begin new ones."""

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        self._store, self._clock = store, clock
        self.now = clock.steady()
        """The time of requests: seconds since 1970, by a clock that is never set while the server runs."""
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[int, CounterWindow]] = {}
        self._ended: dict[str, int] = {}
        """The newest epoch of revoked clients: no session up to it can begin."""
        self._answered: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """When a client's allowance of sessions is restored."""
        self._known: dict[str, ClientRow] = {}
        self._changes = 0
        """Number of changes of approvals: a lookup from before a change is not cached after it."""

    def enrol(self, token: str, name: str, key: bytes, signature: bytes) -> str:
        """Enrol a client that has a token and its private key; return its id. It still must be approved."""
        if len(key) != 32 or not holds(key, enrolment(token, name, key), signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the enrolment is not signed with the key that it names: try again")
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise Refused(HTTPStatus.BAD_REQUEST, f"a name is 1 to {MAX_NAME} letters that can be printed: choose one")
        if re.fullmatch(r"[0-9a-fA-F]{32}", name):  # the operator refers to clients by either
            raise Refused(HTTPStatus.BAD_REQUEST, "this name looks like the id of a client: choose another")
        id, hashed = client_id(key), token_hash(token)
        unknown = Refused(HTTPStatus.FORBIDDEN, "this token is unknown, used or too old: ask for another")
        with self._store.read() as tables:  # guessed tokens must not block the writer
            if not tables.has_token(hashed):
                raise unknown
        with self._store.write() as tables:
            known = tables.client(id)
            if not tables.use_token(hashed, id, self._clock.wall()):
                raise unknown
            if known is None and any(client.name == name for client in tables.clients()):
                raise Refused(HTTPStatus.CONFLICT, f"another client is called '{name}' already: choose another name")
            if known is None:
                tables.add_client(id, name, key)
        return id

    def challenge(self, client: str) -> str:
        """Return a nonce that nobody could know before; nothing is stored for it."""
        return self._nonce(client, str(int(self.now())), secrets.token_hex(8))

    def open_session(self, client: str, nonce: str, signature: bytes) -> tuple[int, ClientRow]:
        """Begin a session of a client, which ends the one before; return its epoch and the client."""
        known = self.approved(client)
        made, _, rest = nonce.partition("-")
        ours = self._nonce(client, made, rest.partition("-")[0])
        if not hmac.compare_digest(nonce.encode(), ours.encode()) or self.now() - int(made) > NONCE_SECONDS:
            raise Refused(
                HTTPStatus.UNAUTHORIZED, "the challenge is old, or for somebody else: ask for another", retry=0.0
            )
        if not holds(known.key, session_request(client, nonce), signature):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the answer to the challenge is not signed with this client's key")
        with self._lock:
            self._answered = {used: until for used, until in self._answered.items() if until > self.now()}
            if nonce in self._answered:
                raise Refused(HTTPStatus.CONFLICT, "this challenge was answered before: ask for another", retry=0.0)
            self._answered[nonce] = self.now() + NONCE_SECONDS + 1
            due = max(self._due.get(client, 0.0), self.now())
            if due > self.now() + SESSIONS * SESSION_SECONDS:
                raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "this client begins sessions all the time: wait", retry=1.0)
            self._due[client] = due + SESSION_SECONDS
        with self._store.write() as tables:  # without the lock, for which every request waits
            known = check_approved(tables.client(client))
            epoch = tables.begin_session(client)
        with self._lock:
            before, _ = self._sessions.get(client, (0, None))
            if epoch <= self._ended.get(client, 0):  # revoked since it was written
                raise Refused(HTTPStatus.FORBIDDEN, SHUT_OUT)
            if epoch > before:
                self._sessions[client] = (epoch, CounterWindow())
        return epoch, known

    def authenticate(self, stamp: Stamp, method: str, path: str) -> ClientRow:
        """Return the client that signed a request, if it is approved and the request is new."""
        known = self.approved(stamp.client)
        if not signed_by(known.key, stamp, method, path):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the request is not signed with this client's key")
        if abs(stamp.time - self.now()) > MAX_AGE:
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                f"the request's time differs from the server's, which is {int(self.now())}: begin a session",
            )
        with self._lock:
            epoch, seen = self._sessions.get(stamp.client, (0, CounterWindow()))
            if epoch == 0 or stamp.epoch > epoch:
                raise Refused(HTTPStatus.UNAUTHORIZED, "there is no such session: begin one")
            if stamp.epoch < epoch:
                raise Refused(
                    HTTPStatus.CONFLICT, "another process has begun a session with this key: stop one of them"
                )
            after = seen.with_counter(stamp.counter)
            if after is None:
                raise Refused(HTTPStatus.CONFLICT, "this request was made before: count on", retry=0.0)
            self._sessions[stamp.client] = (epoch, after)
        return known

    def is_cached(self, client: str) -> bool:
        """Return whether a client's approval is known without a lookup in the store."""
        return client in self._known

    def clear_cache(self) -> None:
        """Forget cached approvals, since one has changed."""
        with self._lock:
            self._changes += 1
            self._known.clear()

    def end_session(self, client: str, epoch: int) -> None:
        """End a client's sessions up to an epoch, such as when it was revoked."""
        with self._lock:
            self._ended[client] = epoch
            self._sessions.pop(client, None)

    def approved(self, client: str) -> ClientRow:
        """Return the client of this id, if it is approved."""
        known = self._known.get(client)
        if known is not None:
            return known
        before = self._changes
        with self._store.read() as tables:
            known = check_approved(tables.client(client))
        with self._lock:
            if before == self._changes:  # else it may have been revoked since the lookup
                self._known[client] = known
        return known

    def _nonce(self, client: str, made: str, chance: str) -> str:
        return f"{made}-{chance}-{hmac.digest(self._secret, f'{made}/{chance}/{client}'.encode(), 'sha256').hex()}"


def check_approved(client: ClientRow | None) -> ClientRow:
    """Refuse a client that is unknown, not approved yet, or revoked."""
    if client is None:
        raise Refused(HTTPStatus.UNAUTHORIZED, "this server does not know this client: enrol it")
    if client.status is Status.PENDING:
        raise Refused(
            HTTPStatus.FORBIDDEN, "the operator has not approved this client yet: ask them to", APPROVAL_SECONDS
        )
    if client.status is not Status.APPROVED:
        raise Refused(HTTPStatus.FORBIDDEN, SHUT_OUT)
    return client
