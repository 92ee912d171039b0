"""The gate: who may speak to the server, and that nobody's words are heard twice."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from http import HTTPStatus

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
from atoll.network.server.clock import Clock
from atoll.network.server.store import Store
from atoll.network.server.tables import ClientRow, Status

NONCE_SECONDS = 60
"""How long a client has to answer a challenge."""
SESSIONS, SESSION_SECONDS = 20, 1.0
"""So many sessions a client may begin at once, each of which is written down; and one more after so long."""
MAX_NAME = 100
APPROVAL_SECONDS = 10.0
"""How long a client that waits for approval should wait before it asks again."""

SHUT_OUT = "this client was shut out: ask the operator why"
SYSTEM = Clock()


class Refused(AtollError):
    """A request that is not served; `status` is HTTP's word for why, `retry` when to try again if that may help."""

    def __init__(self, status: HTTPStatus, text: str, retry: float | None = None) -> None:
        super().__init__(text)
        self.status, self.retry = status, retry


class Authenticator:
    """Lets enrolled and approved clients in. Sessions live in memory: after a restart clients begin new ones."""

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        self._store, self._clock = store, clock
        self.now = clock.steady()
        """The time that requests are stamped with: seconds since 1970, which are not set while the server runs."""
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[int, CounterWindow]] = {}
        self._ended: dict[str, int] = {}
        """The newest epoch of clients that were shut out: no session up to it begins any more."""
        self._answered: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """Until when a client has used up the sessions that it may begin."""
        self._known: dict[str, ClientRow] = {}
        self._changes = 0
        """How often somebody was let in or shut out: what was looked up before is not remembered after."""

    def enrol(self, token: str, name: str, key: bytes, signature: bytes) -> str:
        """Write down a client that has a token and the private half of its key; its id. It still must be approved."""
        if len(key) != 32 or not holds(key, enrolment(token, name, key), signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the enrolment is not signed with the key that it names: try again")
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise Refused(HTTPStatus.BAD_REQUEST, f"a name is 1 to {MAX_NAME} letters that can be printed: choose one")
        if re.fullmatch(r"[0-9a-fA-F]{32}", name):  # the operator calls clients by either
            raise Refused(HTTPStatus.BAD_REQUEST, "this name looks like the id of a client: choose another")
        id, hashed = client_id(key), token_hash(token)
        unknown = Refused(HTTPStatus.FORBIDDEN, "this token is unknown, used or too old: ask for another")
        with self._store.read() as tables:  # who guesses tokens does not keep anybody from writing
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
        """Something to sign that nobody could know before; nothing is remembered for it."""
        return self._nonce(client, str(int(self.now())), secrets.token_hex(8))

    def open_session(self, client: str, nonce: str, signature: bytes) -> tuple[int, ClientRow]:
        """Begin a client's session, and end the one that it has; its epoch."""
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
        with self._store.write() as tables:  # not under the lock, for which every request waits
            known = check_approved(tables.client(client))
            epoch = tables.begin_session(client)
        with self._lock:
            before, _ = self._sessions.get(client, (0, None))
            if epoch <= self._ended.get(client, 0):  # shut out since it was written down
                raise Refused(HTTPStatus.FORBIDDEN, SHUT_OUT)
            if epoch > before:
                self._sessions[client] = (epoch, CounterWindow())
        return epoch, known

    def authenticate(self, stamp: Stamp, method: str, path: str) -> ClientRow:
        """The client that signed a request's head, if it may, and if this is the first time that it is heard."""
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
        """Whether somebody can be let in without a look at the store."""
        return client in self._known

    def clear_cache(self) -> None:
        """Look clients up again: somebody was let in or shut out."""
        with self._lock:
            self._changes += 1
            self._known.clear()

    def end_session(self, client: str, epoch: int) -> None:
        """Forget a client's session, such as that of one who was revoked, and all that began up to this epoch."""
        with self._lock:
            self._ended[client] = epoch
            self._sessions.pop(client, None)

    def approved(self, client: str) -> ClientRow:
        """The client of this id, if it is let in."""
        known = self._known.get(client)
        if known is not None:
            return known
        before = self._changes
        with self._store.read() as tables:
            found = check_approved(tables.client(client))
        with self._lock:
            if before == self._changes:  # else it may have been shut out since the look
                self._known[client] = found
        return found

    def _nonce(self, client: str, made: str, chance: str) -> str:
        return f"{made}-{chance}-{hmac.digest(self._secret, f'{made}/{chance}/{client}'.encode(), 'sha256').hex()}"


def check_approved(client: ClientRow | None) -> ClientRow:
    """Refuse who is not known, not approved yet, or was shut out."""
    if client is None:
        raise Refused(HTTPStatus.UNAUTHORIZED, "this server does not know this client: enrol it")
    if client.status is Status.PENDING:
        raise Refused(
            HTTPStatus.FORBIDDEN, "the operator has not approved this client yet: ask them to", APPROVAL_SECONDS
        )
    if client.status is not Status.APPROVED:
        raise Refused(HTTPStatus.FORBIDDEN, SHUT_OUT)
    return client
