"""The client's line to its server: sessions, trouble that passes and trouble that does not, objects in chunks."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from network.scripted_server import CUT_AFTER, CUT_BEFORE, ScriptedServer, serving

from atoll.core.errors import RunError
from atoll.network.client.connection import LONGEST_PAUSE, Connection, Declined, tls_context
from atoll.network.protocol.blobs import Disk
from atoll.network.protocol.endpoints import POLL
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import About, Missing, Order, Orders, Poll, Problem, Ref, RunInfo
from atoll.network.protocol.objects import CHUNK, ObjectError, Objects, manifest_of
from atoll.network.server.certs import make_certificates
from atoll.network.server.web import tls_context as server_tls

DATA = random.Random(0).randbytes(5 * CHUNK + 17)
WITH_TASK = Order("run", 0, 0, Ref("0" * 64, 0))


@pytest.fixture
def server(tmp_path: Path) -> ScriptedServer:
    made = ScriptedServer(tmp_path)
    made.add_run(RunInfo("run", {}, "", 1, 1, 0, 1), torch.zeros(1))
    return made


@pytest.fixture
def url(server: ScriptedServer) -> Iterator[str]:
    with serving(server) as address:
        yield address


class Sleeps(list[float]):
    """Notes how long somebody would have slept, and does something in that time."""

    def __init__(self, work: Callable[[], None] = lambda: None, most: int = 50) -> None:
        super().__init__()
        self.work, self.most = work, most

    def __call__(self, seconds: float) -> None:
        self.append(seconds)
        assert len(self) < self.most, "it tries for ever"
        self.work()


def enrolled(server: ScriptedServer, url: str, **options: Any) -> Connection:
    """A client that is in."""
    key = Ed25519PrivateKey.generate()
    with Connection(url, key, options.get("tls"), keep_trying=False) as connection:
        connection.enrol(server.token(str(len(server.log))), f"client {len(server.log)}")
    server.approve_all()
    return Connection(url, key, **{"sleep": Sleeps(), "say": lambda text: None, **options})


def poll(connection: Connection) -> Orders:
    return connection.ask(POLL, Poll(1, 0.0))


def test_a_client_waits_for_approval_and_says_so_once(server: ScriptedServer, url: str) -> None:
    said: list[str] = []
    sleeps = Sleeps(lambda: server.approve_all() if len(sleeps) == 5 else None)
    with Connection(url, Ed25519PrivateKey.generate(), sleep=sleeps, say=said.append) as connection:
        connection.enrol(server.token(), "hospital")
        assert connection.welcome().name == "hospital"
    assert len(sleeps) == 5 and min(sleeps) >= 10  # as the server asked for
    assert len(said) == 1 and "not approved" in said[0]


def test_who_is_unknown_or_shut_out_is_told_so(server: ScriptedServer, url: str) -> None:
    with Connection(url, Ed25519PrivateKey.generate()) as stranger, pytest.raises(RunError, match="enrol it"):
        stranger.welcome()
    with enrolled(server, url) as connection:
        poll(connection)
        with server.store.write() as tables:
            tables.revoke(connection.client)
        server.authenticator.clear_cache()
        with pytest.raises(RunError, match="shut out"):
            poll(connection)
    with Connection(url, Ed25519PrivateKey.generate()) as stranger, pytest.raises(RunError, match="token"):
        stranger.enrol("guess", "name")


def test_the_first_of_two_processes_with_one_key_ends(server: ScriptedServer, url: str) -> None:
    with enrolled(server, url) as first, Connection(url, first._key) as second:
        poll(first)
        poll(second)
        with pytest.raises(RunError, match="another process"):
            poll(first)
        poll(second)


def test_a_server_that_was_started_anew_gets_a_new_session_at_once(server: ScriptedServer, url: str) -> None:
    sleeps = Sleeps()
    with enrolled(server, url, sleep=sleeps) as connection:
        for _ in range(5):
            poll(connection)
            server.restart()
    assert sleeps == []


def test_a_server_that_was_away_for_long_gets_a_new_session_at_once(server: ScriptedServer, url: str) -> None:
    sleeps = Sleeps()
    with enrolled(server, url, sleep=sleeps) as connection:
        poll(connection)
        kinds: list[Any] = [CUT_BEFORE] * 8
        server.restart()
        server.trouble = lambda method, path: kinds.pop() if kinds else None
        poll(connection)
    assert len(sleeps) == 8  # none for the session


def test_who_is_always_to_begin_anew_does_so_with_pauses(server: ScriptedServer, url: str) -> None:
    sleeps = Sleeps()
    with enrolled(server, url, sleep=sleeps) as connection:
        answers: list[Any] = [(401, Problem("there is no such session: begin one"))] * 5
        server.trouble = lambda method, path: answers.pop() if answers and path == "/v1/poll" else None
        poll(connection)
    assert len(sleeps) == 4


def test_a_request_that_was_doubled_is_made_again(server: ScriptedServer, url: str) -> None:
    with enrolled(server, url) as connection:
        poll(connection)
        answers = iter([(409, Problem("this request was made before: count on", 0.0)), None])
        server.trouble = lambda method, path: next(answers)
        assert poll(connection) == Orders(open=1, spread=0.0)


def test_pauses_grow_to_a_minute_and_no_further(server: ScriptedServer, url: str) -> None:
    sleeps, said = Sleeps(most=500), list[str]()
    with enrolled(server, url, sleep=sleeps, say=said.append) as connection:
        poll(connection)
        kinds: list[Any] = [CUT_BEFORE, CUT_AFTER, 500, 429, b"{}x"] * 40
        server.trouble = lambda method, path: kinds.pop() if kinds else None
        poll(connection)
    assert len(sleeps) == 200
    for number, pause in enumerate(sleeps):
        assert 0 <= pause <= min(2.0**number, LONGEST_PAUSE)
    assert max(sleeps) > LONGEST_PAUSE / 2 and min(sleeps[20:]) < LONGEST_PAUSE / 4  # all of the pause is drawn from
    assert len(said) == 200  # each time something else


def test_what_does_not_pass_is_not_tried_for_ever(server: ScriptedServer, url: str) -> None:
    with enrolled(server, url) as connection:
        poll(connection)
        for status in (400, 404, 410, 413):
            server.trouble = lambda method, path, status=status: (status, Problem("no"))
            with pytest.raises(Declined, match="no") as error:
                poll(connection)
            assert error.value.status == status
        server.trouble = lambda method, path: (426, Problem("update it"))
        with pytest.raises(RunError, match="update it"):
            poll(connection)
        server.trouble = lambda method, path: b"x" * (1 << 20) + b"y"
        with pytest.raises(ObjectError, match="more than 1,048,576 bytes"):
            poll(connection)


def test_another_server_and_another_protocol_are_refused(server: ScriptedServer, url: str) -> None:
    with enrolled(server, url, server_key=bytes(32)) as connection, pytest.raises(RunError, match="another key"):
        poll(connection)
    server.trouble = lambda method, path: About((2, 3), public_bytes(server.key), 0)
    with Connection(url, Ed25519PrivateKey.generate()) as connection, pytest.raises(RunError, match="version 2, 3"):
        connection.about()


@pytest.mark.parametrize("ahead", [-100_000, 100_000])
def test_a_wrong_clock_does_no_harm(tmp_path: Path, ahead: float) -> None:
    server = ScriptedServer(tmp_path, lambda: time.time() + ahead)
    with serving(server) as url, enrolled(server, url) as connection:
        assert poll(connection) == Orders(spread=0.0)


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_a_clock_that_is_set_ends_no_session(
    server: ScriptedServer, url: str, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    wall = time.time
    with enrolled(server, url) as connection:
        poll(connection)
        monkeypatch.setattr(time, "time", lambda: wall() + step)
        poll(connection)
    assert [status for _, path, status in server.log if path == "/v1/poll"] == [200, 200]


def test_addresses_without_tls_are_of_this_machine() -> None:
    for url in ("http://example.org", "ftp://localhost", "localhost:1", ""):
        with pytest.raises(RunError, match="https://"):
            Connection(url, Ed25519PrivateKey.generate())


def test_tls_is_checked_by_the_authority_that_was_given(tmp_path: Path, server: ScriptedServer) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for name in ("good", "other"):
        make_certificates(tmp_path / name, ["127.0.0.1"], now)
    tls = server_tls(tmp_path / "good/server.pem", tmp_path / "good/server.key")
    with serving(server, tls) as url:
        with enrolled(server, url, tls=tls_context(tmp_path / "good/ca.pem")) as connection:
            poll(connection)
        for authority in (tmp_path / "other/ca.pem", None):
            with (
                Connection(url, Ed25519PrivateKey.generate(), tls_context(authority), keep_trying=False) as connection,
                pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                connection.about()
    with pytest.raises(RunError, match="--ca"):
        tls_context(tmp_path / "no.pem")


def test_a_client_has_a_certificate_where_the_server_asks_for_one(tmp_path: Path, server: ScriptedServer) -> None:
    now = datetime.datetime.now(datetime.UTC)
    make_certificates(tmp_path, ["127.0.0.1"], now)
    key, name = generate_private_key(SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    own = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "own.pem").write_bytes(own.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "own.key").write_bytes(secret)
    tls = server_tls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "own.pem")
    with serving(server, tls) as url:
        with enrolled(
            server, url, tls=tls_context(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
        ) as connection:
            poll(connection)
        with (
            Connection(
                url, Ed25519PrivateKey.generate(), tls_context(tmp_path / "ca.pem"), keep_trying=False
            ) as nobody,
            pytest.raises(RunError, match="cannot be reached"),
        ):
            nobody.about()


def chunk_requests(server: ScriptedServer, method: str) -> list[str]:
    return [
        path.rpartition("/")[2]
        for verb, path, status in server.log
        if verb == method and status == 200 and ("/chunks/" in path or path.count("/") == 6)
    ]


class Killed(BaseException):
    """The process ends here."""


def kill(seconds: float) -> None:
    raise Killed


def test_a_download_goes_on_where_it_was_interrupted(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    ref = server.put(DATA)
    with enrolled(server, url, sleep=kill) as connection:
        server.trouble = lambda method, path: CUT_AFTER if path.endswith("/3") else None
        with pytest.raises(Killed):
            connection.download("run", ref, Objects(Disk(tmp_path / "here")))
        server.trouble = lambda method, path: None
        server.log.clear()
        connection.download("run", ref, Objects(Disk(tmp_path / "here")))
    assert bytes(Objects(Disk(tmp_path / "here")).get(ref.name)) == DATA
    assert chunk_requests(server, "GET") == ["3", "4", "5"]


def test_equal_chunks_travel_once(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    ref = server.put(bytes(7 * CHUNK))
    with enrolled(server, url) as connection:
        connection.download("run", ref, Objects(Disk(tmp_path / "here")))
    assert bytes(Objects(Disk(tmp_path / "here")).get(ref.name)) == bytes(7 * CHUNK)
    assert chunk_requests(server, "GET") == ["0"]


def test_an_upload_sends_only_what_is_missing(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    manifest = manifest_of(DATA)
    names = [digest.hex() for digest in manifest.chunks]
    with enrolled(server, url) as connection:
        server.orders[0] = [WITH_TASK]
        lost = iter([None, CUT_BEFORE, CUT_AFTER])
        server.trouble = lambda method, path: next(lost, None) if method == "PUT" else None
        connection.upload("run", 0, DATA)
        assert server.objects.missing(manifest) == []
        server.log.clear()
        connection.upload("run", 0, DATA)
        assert [method for method, _, _ in server.log] == ["POST"]
        (server.path / "objects" / "chunks" / names[1]).unlink()
        connection.upload("run", 0, DATA)
        assert chunk_requests(server, "PUT") == [names[1]]
        server.trouble = lambda method, path: Missing(("0" * 64,)) if path.endswith("missing") else None
        with pytest.raises(ObjectError, match="not of this update"):
            connection.upload("run", 0, DATA)


def test_objects_that_are_not_what_was_said_are_not_kept(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    ref, other = server.put(DATA), server.put(b"another object")
    lies: list[tuple[Ref, Callable[[str, str], Any], str]] = [
        (ref, lambda m, p: msgspec.msgpack.encode(server.objects.manifest(other.name)), "another object"),
        (ref, lambda m, p: b"x" * CHUNK if p.endswith("/0") else None, "hash"),
        (ref, lambda m, p: b"x" * (CHUNK + 1) if p.endswith("/0") else None, "more than"),
        (ref, lambda m, p: b"rubbish", "no manifest"),
        (Ref(ref.name, 10), lambda m, p: None, "at most 10"),
        (Ref(ref.name, ref.num_bytes + 1), lambda m, p: None, "another object"),
    ]
    with enrolled(server, url) as connection:
        poll(connection)
        for number, (wanted, trouble, says) in enumerate(lies):
            server.trouble = trouble
            blobs = Disk(tmp_path / f"here-{number}")
            with pytest.raises(ObjectError, match=says):
                connection.download("run", wanted, Objects(blobs))
            assert blobs.sizes("") == {}
