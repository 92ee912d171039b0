"""Who may speak, and that nobody is heard twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.network.clock import Clock
from atoll.network.gate import (
    NONCE_SECONDS,
    SESSION_SECONDS,
    SESSIONS,
    Gate,
    Refused,
    enrolment,
    session_request,
    token_hash,
)
from atoll.network.identity import MAX_AGE, Stamp, client_id, public_bytes, sign
from atoll.network.store import Book, Store


class World:
    """A gate with a clock that stands still unless it is moved."""

    def __init__(self, path: Path) -> None:
        self.store, self.now = Store(f"sqlite:///{path}/store.db"), 1_700_000_000.0
        self.ahead = 0.0
        self.clock = Clock(lambda: self.now + self.ahead, lambda: self.now)
        self.gate = Gate(self.store, self.clock)
        with self.store.change() as book:
            book.add_token(token_hash("token"), self.now + 1000)

    def enrol(self, key: Ed25519PrivateKey, name: str = "hospital", token: str = "token") -> str:
        public = public_bytes(key)
        return self.gate.enrol(token, name, public, key.sign(enrolment(token, name, public)))

    def approve(self, id: str) -> None:
        with self.store.change() as book:
            book.approve(id)

    def session(self, key: Ed25519PrivateKey) -> int:
        id = client_id(public_bytes(key))
        nonce = self.gate.challenge(id)
        return self.gate.open_session(id, nonce, key.sign(session_request(id, nonce)))[0]

    def request(self, key: Ed25519PrivateKey, epoch: int, counter: int, time: float | None = None) -> Stamp:
        stamp = Stamp(client_id(public_bytes(key)), epoch, counter, int(time or self.now))
        return sign(key, stamp, "POST", "/v1/poll", b"")

    def heard(self, stamp: Stamp) -> str:
        return self.gate.check(stamp, "POST", "/v1/poll").name


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def key(world: World) -> Ed25519PrivateKey:
    """The key of a client that is in."""
    made = Ed25519PrivateKey.generate()
    world.approve(world.enrol(made))
    return made


def refused(status: HTTPStatus, says: str, work: Callable[[], object]) -> None:
    with pytest.raises(Refused, match=says) as error:
        work()
    assert error.value.status == status


def test_an_approved_client_is_heard(world: World, key: Ed25519PrivateKey) -> None:
    epoch = world.session(key)
    assert [world.heard(world.request(key, epoch, counter)) for counter in (1, 2, 5, 4)] == ["hospital"] * 4


def test_a_client_waits_for_approval_and_can_be_shut_out(world: World) -> None:
    key = Ed25519PrivateKey.generate()
    refused(HTTPStatus.UNAUTHORIZED, "enrol it", lambda: world.session(key))
    id = world.enrol(key)
    assert world.enrol(key) == id  # asked again, because the answer was lost
    refused(HTTPStatus.FORBIDDEN, "not approved", lambda: world.session(key))
    world.approve(id)
    epoch = world.session(key)
    with world.store.change() as book:
        book.revoke(id)
    world.gate.forget()
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: world.heard(world.request(key, epoch, 1)))
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: world.session(key))
    world.gate.end(id, epoch + 1)
    world.approve(id)
    refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda: world.heard(world.request(key, epoch, 1)))


def test_a_revocation_outruns_a_request_that_looked_before_it(world: World, key: Ed25519PrivateKey) -> None:
    id, look = client_id(public_bytes(key)), world.store.look
    epoch = world.session(key)
    world.gate.forget()

    @contextmanager
    def revoked_meanwhile() -> Iterator[Book]:
        with look() as book:
            yield book
        world.store.look = look  # type: ignore[method-assign]
        revoke(world, id)

    world.store.look = revoked_meanwhile  # type: ignore[method-assign]
    with suppress(Refused):  # it looked while the client was in: of what it found nothing is remembered
        world.heard(world.request(key, epoch, 1))
    refused(HTTPStatus.FORBIDDEN, "shut out", lambda: world.session(key))
    for counter in (2, 3):
        refused(HTTPStatus.FORBIDDEN, "shut out", lambda c=counter: world.heard(world.request(key, epoch, c)))


def test_no_session_begins_while_its_client_is_revoked(world: World, key: Ed25519PrivateKey) -> None:
    id, change = client_id(public_bytes(key)), world.store.change

    @contextmanager
    def revoked_before() -> Iterator[Book]:
        world.store.change = change  # type: ignore[method-assign]
        revoke(world, id)
        with change() as book:
            yield book

    @contextmanager
    def revoked_after() -> Iterator[Book]:
        world.store.change = change  # type: ignore[method-assign]
        with change() as book:
            yield book
        revoke(world, id)

    for racing in (revoked_before, revoked_after):
        world.store.change = racing  # type: ignore[method-assign]
        refused(HTTPStatus.FORBIDDEN, "shut out", lambda: world.session(key))
        world.approve(id)
        world.gate.forget()
        with world.store.look() as book:
            newest = book.client(id)
        assert newest is not None
        for epoch in range(1, newest.epoch + 1):
            refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda e=epoch: world.heard(world.request(key, e, 1)))
        assert world.heard(world.request(key, world.session(key), 1)) == "hospital"


def revoke(world: World, id: str) -> None:
    """Shut a client out, as a hub does."""
    with world.store.change() as book:
        epoch = book.revoke(id)
    world.gate.end(id, epoch)
    world.gate.forget()


def test_a_session_goes_on_when_the_servers_clock_is_set(world: World, key: Ed25519PrivateKey) -> None:
    epoch = world.session(key)
    for counter, step in enumerate((7200.0, -14400.0), 1):
        world.ahead += step
        assert world.heard(world.request(key, epoch, counter)) == "hospital"
        nonce = world.gate.challenge(client_id(public_bytes(key)))
        world.ahead -= 2 * step  # between a challenge and its answer, too
        signature = key.sign(session_request(client_id(public_bytes(key)), nonce))
        epoch, _ = world.gate.open_session(client_id(public_bytes(key)), nonce, signature)


def test_enrolment_needs_a_token_a_name_and_the_key(world: World, key: Ed25519PrivateKey) -> None:
    other = Ed25519PrivateKey.generate()
    refused(HTTPStatus.FORBIDDEN, "token", lambda: world.enrol(other, "bank"))  # used by another
    refused(HTTPStatus.FORBIDDEN, "token", lambda: world.enrol(other, "bank", "guess"))
    with world.store.change() as book:
        book.add_token(token_hash("two"), world.now + 10)
    refused(HTTPStatus.CONFLICT, "another name", lambda: world.enrol(other, "hospital", "two"))
    for name in ("", "x" * 101, "line\nbreak", "\x1b[31m"):
        refused(HTTPStatus.BAD_REQUEST, "letters", lambda name=name: world.enrol(other, name, "two"))
    stolen = key.sign(enrolment("two", "bank", public_bytes(other)))
    refused(HTTPStatus.FORBIDDEN, "not signed", lambda: world.gate.enrol("two", "bank", public_bytes(other), stolen))
    refused(HTTPStatus.FORBIDDEN, "not signed", lambda: world.gate.enrol("two", "bank", b"short", stolen))
    world.now += 11
    refused(HTTPStatus.FORBIDDEN, "too old", lambda: world.enrol(other, "bank", "two"))


def test_a_capture_cannot_be_replayed(world: World, key: Ed25519PrivateKey) -> None:
    epoch = world.session(key)
    stamp = world.request(key, epoch, 7)
    world.heard(stamp)
    refused(HTTPStatus.CONFLICT, "made before", lambda: world.heard(stamp))
    world.session(key)
    refused(HTTPStatus.CONFLICT, "another process", lambda: world.heard(world.request(key, epoch, 8)))
    again = Gate(world.store, world.clock)  # the server was started anew
    refused(HTTPStatus.UNAUTHORIZED, "begin one", lambda: again.check(stamp, "POST", "/v1/poll"))


def test_a_challenge_is_answered_once_in_time_and_by_whom_it_is_for(world: World, key: Ed25519PrivateKey) -> None:
    id, other = client_id(public_bytes(key)), Ed25519PrivateKey.generate()
    nonce = world.gate.challenge(id)
    refused(HTTPStatus.UNAUTHORIZED, "key", lambda: world.gate.open_session(id, nonce, bytes(64)))
    signature = key.sign(session_request(id, nonce))
    foreign = world.gate.challenge("f" * 32)
    for wrong in (foreign, "", "x", "-", "1" * 400, nonce + "0", "٣-x"):
        refused(HTTPStatus.UNAUTHORIZED, "ask for", lambda wrong=wrong: world.gate.open_session(id, wrong, signature))
    world.gate.open_session(id, nonce, signature)
    refused(HTTPStatus.CONFLICT, "before", lambda: world.gate.open_session(id, nonce, signature))
    late = world.gate.challenge(id)
    world.now += NONCE_SECONDS + 1
    refused(
        HTTPStatus.UNAUTHORIZED, "old", lambda: world.gate.open_session(id, late, key.sign(session_request(id, late)))
    )
    assert other is not key


def test_stale_forged_and_foreign_requests_are_refused(world: World, key: Ed25519PrivateKey) -> None:
    epoch, other = world.session(key), Ed25519PrivateKey.generate()
    for time in (world.now - MAX_AGE - 2, world.now + MAX_AGE + 2):
        refused(
            HTTPStatus.UNAUTHORIZED, "time differs", lambda time=time: world.heard(world.request(key, epoch, 1, time))
        )
    forged = world.request(other, epoch, 1)._replace(client=client_id(public_bytes(key)))
    refused(HTTPStatus.UNAUTHORIZED, "not signed", lambda: world.heard(forged))
    refused(HTTPStatus.UNAUTHORIZED, "does not know", lambda: world.heard(world.request(other, epoch, 1)))
    refused(HTTPStatus.UNAUTHORIZED, "no such session", lambda: world.heard(world.request(key, epoch + 1, 1)))
    assert world.heard(world.request(key, epoch, 1)) == "hospital"  # and none of that has hurt the client


def test_a_client_begins_few_sessions(world: World, key: Ed25519PrivateKey) -> None:
    began = [world.session(key) for _ in range(SESSIONS)]
    world.session(key)
    refused(HTTPStatus.TOO_MANY_REQUESTS, "all the time", lambda: world.session(key))
    world.now += SESSION_SECONDS
    assert world.session(key) > max(began)


def test_nobody_is_called_by_the_id_of_another(world: World, key: Ed25519PrivateKey) -> None:
    with world.store.change() as book:
        book.add_token(token_hash("two"), world.now + 10)
    name = client_id(public_bytes(key))
    refused(HTTPStatus.BAD_REQUEST, "id of a client", lambda: world.enrol(Ed25519PrivateKey.generate(), name, "two"))
