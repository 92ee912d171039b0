"""The gate: who may speak to the server, and that nobody's words are heard twice."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus

from atoll.core.errors import AtollError
from atoll.network.identity import MAX_AGE, Seen, Stamp, client_id, holds, signed_by
from atoll.network.store import Store
from atoll.network.tables import ClientRow, Status

NONCE_SECONDS = 60
"""How long a client has to answer a challenge."""
MAX_NAME = 100
APPROVAL_SECONDS = 10.0
"""How long a client that waits for approval should wait before it asks again."""


class Refused(AtollError):
    """A request that is not served; `status` is HTTP's word for why, `retry` when to try again if that may help."""

    def __init__(self, status: HTTPStatus, text: str, retry: float | None = None) -> None:
        super().__init__(text)
        self.status, self.retry = status, retry


class Gate:
    """Lets enrolled and approved clients in. Sessions live in memory: after a restart clients begin new ones."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store, self._now = store, now
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[int, Seen]] = {}
        self._answered: dict[str, float] = {}
        self._known: dict[str, ClientRow] = {}

    def enrol(self, token: str, name: str, key: bytes, signature: bytes) -> str:
        """Write down a client that has a token and the private half of its key; its id. It still must be approved."""
        if len(key) != 32 or not holds(key, enrolment(token, name, key), signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the enrolment is not signed with the key that it names: try again")
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise Refused(HTTPStatus.BAD_REQUEST, f"a name is 1 to {MAX_NAME} letters that can be printed: choose one")
        id = client_id(key)
        with self._store.change() as book:
            known = book.client(id)
            if not book.use_token(token_hash(token), id, self._now()):
                raise Refused(HTTPStatus.FORBIDDEN, "this token is unknown, used or too old: ask for another")
            if known is None and any(client.name == name for client in book.clients()):
                raise Refused(HTTPStatus.CONFLICT, f"another client is called '{name}' already: choose another name")
            if known is None:
                book.add_client(id, name, key)
        return id

    def challenge(self, client: str) -> str:
        """Something to sign that nobody could know before; nothing is remembered for it."""
        return self._nonce(client, str(int(self._now())), secrets.token_hex(8))

    def open_session(self, client: str, nonce: str, signature: bytes) -> tuple[int, ClientRow]:
        """Begin a client's session, and end the one that it has; its epoch."""
        known = self._approved(client)
        made, _, rest = nonce.partition("-")
        ours = self._nonce(client, made, rest.partition("-")[0])
        if not hmac.compare_digest(nonce.encode(), ours.encode()) or self._now() - int(made) > NONCE_SECONDS:
            raise Refused(
                HTTPStatus.UNAUTHORIZED, "the challenge is old, or for somebody else: ask for another", retry=0.0
            )
        if not holds(known.key, session_request(client, nonce), signature):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the answer to the challenge is not signed with this client's key")
        with self._lock:
            self._answered = {used: until for used, until in self._answered.items() if until > self._now()}
            if nonce in self._answered:
                raise Refused(HTTPStatus.CONFLICT, "this challenge was answered before: ask for another", retry=0.0)
            self._answered[nonce] = self._now() + NONCE_SECONDS + 1
            with self._store.change() as book:
                epoch = book.begin_session(client)
            self._sessions[client] = (epoch, Seen())
        return epoch, known

    def check(self, stamp: Stamp, method: str, path: str, body_hash: str) -> ClientRow:
        """The client that sent a request, if it may, and if this is the first time that it is heard."""
        known = self._approved(stamp.client)
        if not signed_by(known.key, stamp, method, path, body_hash):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the request is not signed with this client's key")
        if abs(stamp.time - self._now()) > MAX_AGE:
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                f"the request's time differs from the server's, which is {int(self._now())}: set the clock",
            )
        with self._lock:
            epoch, seen = self._sessions.get(stamp.client, (0, Seen()))
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

    def has_session(self, client: str) -> bool:
        """Whether somebody of this id has shown that it is theirs, since the server was started."""
        return client in self._sessions

    def knows(self, client: str) -> bool:
        """Whether somebody can be let in without a look at the store."""
        return client in self._known

    def forget(self) -> None:
        """Look clients up again: somebody was let in or shut out."""
        self._known.clear()

    def end(self, client: str) -> None:
        """Forget a client's session, such as that of one who was revoked."""
        with self._lock:
            self._sessions.pop(client, None)

    def _approved(self, client: str) -> ClientRow:
        known = self._known.get(client)
        if known is None:
            with self._store.look() as book:
                known = book.client(client)
            if known is not None and known.status is Status.APPROVED:
                self._known[client] = known
        if known is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "this server does not know this client: enrol it")
        if known.status is Status.PENDING:
            raise Refused(
                HTTPStatus.FORBIDDEN, "the operator has not approved this client yet: ask them to", APPROVAL_SECONDS
            )
        if known.status is not Status.APPROVED:
            raise Refused(HTTPStatus.FORBIDDEN, "this client was shut out: ask the operator why")
        return known

    def _nonce(self, client: str, made: str, chance: str) -> str:
        return f"{made}-{chance}-{hmac.digest(self._secret, f'{made}/{chance}/{client}'.encode(), 'sha256').hex()}"


def token_hash(token: str) -> str:
    """What a store keeps of a token."""
    return hashlib.sha256(b"atoll token 1" + token.encode()).hexdigest()


def enrolment(token: str, name: str, key: bytes) -> bytes:
    """What a client signs to enrol."""
    return b"\0".join([b"atoll enrolment 1", token_hash(token).encode(), name.encode(), key])


def session_request(client: str, nonce: str) -> bytes:
    """What a client signs to begin a session."""
    return b"\0".join([b"atoll session 1", client.encode(), nonce.encode()])
