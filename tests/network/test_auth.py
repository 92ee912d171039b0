"""Who may speak, and that nobody is heard twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.network.protocol.identity import (
    MAX_AGE,
    Stamp,
    client_id,
    enrolment,
    public_bytes,
    session_request,
    sign,
    token_hash,
)
from atoll.network.server.auth import NONCE_SECONDS, SESSION_SECONDS, SESSIONS, Authenticator, Clock, Refused
from atoll.network.server.queries import Tables
from atoll.network.server.store import Store


class AuthenticatorSetup:
    """A gate with a clock that stands still unless it is moved."""

    def __init__(self, path: Path) -> None:
        self.store, self.now = Store(f"sqlite:///{path}/store.db"), 1_700_000_000.0
        self.ahead = 0.0
        self.clock = Clock(lambda: self.now + self.ahead, lambda: self.now)
        self.authenticator = Authenticator(self.store, self.clock)
        with self.store.write() as tables:
            tables.add_token(token_hash("token"), self.now + 1000)

    def enrol(self, key: Ed25519PrivateKey, name: str = "hospital", token: str = "token") -> str:
        public = public_bytes(key)
        return self.authenticator.enrol(token, name, public, key.sign(enrolment(token, name, public)))

    def approve(self, id: str) -> None:
        with self.store.write() as tables:
            tables.approve(id)

    def session(self, key: Ed25519PrivateKey) -> int:
        id = client_id(public_bytes(key))
        nonce = self.authenticator.challenge(id)
        return self.authenticator.open_session(id, nonce, key.sign(session_request(id, nonce)))[0]

    def request(self, key: Ed25519PrivateKey, epoch: int, counter: int, time: float | None = None) -> Stamp:
        stamp = Stamp(client_id(public_bytes(key)), epoch, counter, int(time or self.now))
        return sign(key, stamp, "POST", "/v1/poll", b"")

    def heard(self, stamp: Stamp) -> str:
        return self.authenticator.authenticate(stamp, "POST", "/v1/poll").name


@pytest.fixture
def setup(tmp_path: Path) -> AuthenticatorSetup:
    return AuthenticatorSetup(tmp_path)


@pytest.fixture
def key(setup: AuthenticatorSetup) -> Ed25519PrivateKey:
    """The key of a client that is in."""
    made = Ed25519PrivateKey.generate()
    setup.approve(setup.enrol(made))
    return made


def refused(status: HTTPStatus, says: str, work: Callable[[], object]) -> None:
    with pytest.raises(Refused, match=says) as error:
        work()
    assert error.value.status == status


def test_an_approved_client_is_heard(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    epoch = setup.session(key)
    assert [setup.heard(setup.request(key, epoch, counter)) for counter in (1, 2, 5, 4)] == ["hospital"] * 4


def test_a_client_waits_for_approval_and_can_be_shut_out(setup: AuthenticatorSetup) -> None:
    key = Ed25519PrivateKey.generate()
    refused(HTTPStatus.UNAUTHORIZED, "enrol it", lambda: setup.session(key))
    id = setup.enrol(key)
    assert setup.enrol(key) == id  # asked again, because the answer was lost
    refused(HTTPStatus.FORBIDDEN, "not approved", lambda: setup.session(key))
    setup.approve(id)
    epoch = setup.session(key)
    with setup.store.write() as tables:
        tables.revoke(id)
    setup.authenticator.clear_cache()
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: setup.heard(setup.request(key, epoch, 1)))
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: setup.session(key))
    setup.authenticator.end_session(id, epoch + 1)
    setup.approve(id)
    refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda: setup.heard(setup.request(key, epoch, 1)))


def test_a_revocation_outruns_a_request_that_looked_before_it(
    setup: AuthenticatorSetup, key: Ed25519PrivateKey
) -> None:
    id, look = client_id(public_bytes(key)), setup.store.read
    epoch = setup.session(key)
    setup.authenticator.clear_cache()

    @contextmanager
    def revoked_meanwhile() -> Iterator[Tables]:
        with look() as tables:
            yield tables
        setup.store.read = look  # type: ignore[method-assign]
        revoke(setup, id)

    setup.store.read = revoked_meanwhile  # type: ignore[method-assign]
    with suppress(Refused):  # it looked while the client was in: of what it found nothing is remembered
        setup.heard(setup.request(key, epoch, 1))
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: setup.session(key))
    for counter in (2, 3):
        refused(HTTPStatus.FORBIDDEN, "shut out", lambda c=counter: setup.heard(setup.request(key, epoch, c)))


def test_no_session_begins_while_its_client_is_revoked(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    id, change = client_id(public_bytes(key)), setup.store.write

    @contextmanager
    def revoked_before() -> Iterator[Tables]:
        setup.store.write = change  # type: ignore[method-assign]
        revoke(setup, id)
        with change() as tables:
            yield tables

    @contextmanager
    def revoked_after() -> Iterator[Tables]:
        setup.store.write = change  # type: ignore[method-assign]
        with change() as tables:
            yield tables
        revoke(setup, id)

    for racing in (revoked_before, revoked_after):
        setup.store.write = racing  # type: ignore[method-assign]
        refused(HTTPStatus.FORBIDDEN, "shut out", lambda: setup.session(key))
        setup.approve(id)
        setup.authenticator.clear_cache()
        with setup.store.read() as tables:
            newest = tables.client(id)
        assert newest is not None
        for epoch in range(1, newest.epoch + 1):
            refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda e=epoch: setup.heard(setup.request(key, e, 1)))
        assert setup.heard(setup.request(key, setup.session(key), 1)) == "hospital"


def revoke(setup: AuthenticatorSetup, id: str) -> None:
    """Shut a client out, as a hub does."""
    with setup.store.write() as tables:
        epoch = tables.revoke(id)
    setup.authenticator.end_session(id, epoch)
    setup.authenticator.clear_cache()


def test_a_session_goes_on_when_the_servers_clock_is_set(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    epoch = setup.session(key)
    for counter, step in enumerate((7200.0, -14400.0), 1):
        setup.ahead += step
        assert setup.heard(setup.request(key, epoch, counter)) == "hospital"
        nonce = setup.authenticator.challenge(client_id(public_bytes(key)))
        setup.ahead -= 2 * step  # between a challenge and its answer, too
        signature = key.sign(session_request(client_id(public_bytes(key)), nonce))
        epoch, _ = setup.authenticator.open_session(client_id(public_bytes(key)), nonce, signature)


def test_enrolment_needs_a_token_a_name_and_the_key(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    other = Ed25519PrivateKey.generate()
    refused(HTTPStatus.FORBIDDEN, "token", lambda: setup.enrol(other, "bank"))  # used by another
    refused(HTTPStatus.FORBIDDEN, "token", lambda: setup.enrol(other, "bank", "guess"))
    with setup.store.write() as tables:
        tables.add_token(token_hash("two"), setup.now + 10)
    refused(HTTPStatus.CONFLICT, "another name", lambda: setup.enrol(other, "hospital", "two"))
    for name in ("", "x" * 101, "line\nbreak", "\x1b[31m"):
        refused(HTTPStatus.BAD_REQUEST, "letters", lambda name=name: setup.enrol(other, name, "two"))
    stolen = key.sign(enrolment("two", "bank", public_bytes(other)))
    refused(
        HTTPStatus.FORBIDDEN,
        "not signed",
        lambda: setup.authenticator.enrol("two", "bank", public_bytes(other), stolen),
    )
    refused(HTTPStatus.FORBIDDEN, "not signed", lambda: setup.authenticator.enrol("two", "bank", b"short", stolen))
    setup.now += 11
    refused(HTTPStatus.FORBIDDEN, "too old", lambda: setup.enrol(other, "bank", "two"))


def test_a_capture_cannot_be_replayed(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    epoch = setup.session(key)
    stamp = setup.request(key, epoch, 7)
    setup.heard(stamp)
    refused(HTTPStatus.CONFLICT, "made before", lambda: setup.heard(stamp))
    setup.session(key)
    refused(HTTPStatus.CONFLICT, "another process", lambda: setup.heard(setup.request(key, epoch, 8)))
    again = Authenticator(setup.store, setup.clock)  # the server was started anew
    refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda: again.authenticate(stamp, "POST", "/v1/poll"))


def test_a_challenge_is_answered_once_in_time_and_by_whom_it_is_for(
    setup: AuthenticatorSetup, key: Ed25519PrivateKey
) -> None:
    id, other = client_id(public_bytes(key)), Ed25519PrivateKey.generate()
    nonce = setup.authenticator.challenge(id)
    refused(HTTPStatus.UNAUTHORIZED, "key", lambda: setup.authenticator.open_session(id, nonce, bytes(64)))
    signature = key.sign(session_request(id, nonce))
    foreign = setup.authenticator.challenge("f" * 32)
    for wrong in (foreign, "", "x", "-", "1" * 400, nonce + "0", "٣-x"):
        refused(
            HTTPStatus.UNAUTHORIZED,
            "ask for",
            lambda wrong=wrong: setup.authenticator.open_session(id, wrong, signature),
        )
    setup.authenticator.open_session(id, nonce, signature)
    refused(HTTPStatus.CONFLICT, "before", lambda: setup.authenticator.open_session(id, nonce, signature))
    late = setup.authenticator.challenge(id)
    setup.now += NONCE_SECONDS + 1
    refused(
        HTTPStatus.UNAUTHORIZED,
        "old",
        lambda: setup.authenticator.open_session(id, late, key.sign(session_request(id, late))),
    )
    assert other is not key


def test_stale_forged_and_foreign_requests_are_refused(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    epoch, other = setup.session(key), Ed25519PrivateKey.generate()
    for time in (setup.now - MAX_AGE - 2, setup.now + MAX_AGE + 2):
        refused(
            HTTPStatus.UNAUTHORIZED, "time differs", lambda time=time: setup.heard(setup.request(key, epoch, 1, time))
        )
    forged = setup.request(other, epoch, 1)._replace(client=client_id(public_bytes(key)))
    refused(HTTPStatus.UNAUTHORIZED, "not signed", lambda: setup.heard(forged))
    refused(HTTPStatus.UNAUTHORIZED, "does not know", lambda: setup.heard(setup.request(other, epoch, 1)))
    refused(HTTPStatus.UNAUTHORIZED, "no such session", lambda: setup.heard(setup.request(key, epoch + 1, 1)))
    assert setup.heard(setup.request(key, epoch, 1)) == "hospital"  # and none of that has hurt the client


def test_a_client_begins_few_sessions(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    began = [setup.session(key) for _ in range(SESSIONS)]
    setup.session(key)
    refused(HTTPStatus.TOO_MANY_REQUESTS, "all the time", lambda: setup.session(key))
    setup.now += SESSION_SECONDS
    assert setup.session(key) > max(began)


def test_nobody_is_called_by_the_id_of_another(setup: AuthenticatorSetup, key: Ed25519PrivateKey) -> None:
    with setup.store.write() as tables:
        tables.add_token(token_hash("two"), setup.now + 10)
    name = client_id(public_bytes(key))
    refused(HTTPStatus.BAD_REQUEST, "id of a client", lambda: setup.enrol(Ed25519PrivateKey.generate(), name, "two"))
