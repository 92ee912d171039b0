"""Requests as nobody should make them: too long, too slow, in disguise, or no requests at all; others go on."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from network.federation import RUN, Federation, federation, memory_of, until
from network.fork_server import ForkServer
from network.raw_client import TASK, RawClient, RawConnection, approved_raw_clients, constant_update, request

from atoll import Plan
from atoll.network.protocol.endpoints import ENDPOINTS
from atoll.network.protocol.identity import Stamp
from atoll.network.protocol.messages import Answer, Message, Poll
from atoll.network.protocol.objects import CHUNK, manifest_of
from atoll.network.server.limits import MAX_BODIES_PER_CLIENT
from atoll.network.server.uploads import MAX_SHORT_CHUNKS

MANY = Plan(rounds=1_000_000, policy={"name": "cohort"}, evaluation={"every": 0})
MEGABYTE = 1 << 20


@pytest.fixture
def made(processes: ForkServer, certs: Path, tmp_path: Path) -> Iterator[Federation]:
    """A federation with an endless run of everybody."""
    with federation(tmp_path / "f", processes, certs, MANY) as found:
        yield found


@pytest.fixture(scope="module")
def open_server(
    processes: ForkServer, certs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Federation, RawClient]]:
    """A server that tests share, and a client that is at work: it has an order that it does not do."""
    with federation(tmp_path_factory.mktemp("open"), processes, certs, MANY) as found:
        (raw_client,) = approved_raw_clients(found, 1)
        found.serve("--clients", "1")
        assert raw_client.begin().status == 200
        raw_client.order()
        yield found, raw_client


def test_an_object_that_is_too_large_is_refused_by_its_manifest(open_server: tuple[Federation, RawClient]) -> None:
    _, raw_client = open_server
    path = TASK.format(run=RUN, attempt=raw_client.order().attempt)
    for num, chunks in ((1 << 40, 1), (10 << 30, 10 << 10), (CHUNK, 5), (7, 0)):
        manifest = msgspec.msgpack.encode([num, [bytes(32)] * chunks])
        said = raw_client.ask("POST", f"{path}/missing", Answer(manifest))
        assert 400 <= said.status < 500, said
    for number in range(8):  # chunks of nothing that was announced
        data = bytes([number]) * CHUNK
        said = raw_client.ask("PUT", f"{path}/chunks/{manifest_of(data).chunks[0].hex()}", data)
    assert (said.status, "more was sent for this task" in said.error) == (413, True)
    said = raw_client.ask("PUT", f"{path}/chunks/{'00' * 32}", b"other bytes")
    assert said.status in (413, 422)


def test_tiny_chunks_are_few(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    path = TASK.format(run=RUN, attempt=raw_client.order().attempt)
    said = [
        raw_client.ask("PUT", f"{path}/chunks/{hashlib.sha256(data).hexdigest()}", data).status
        for data in (number.to_bytes(3, "big") for number in range(60))
    ]
    assert 0 < said.count(200) <= MAX_SHORT_CHUNKS and said.count(413) == 60 - said.count(200)
    files = [each for each in (made.directory() / "uploads").rglob("*") if each.is_file()]
    assert len(files) <= MAX_SHORT_CHUNKS + 2


@pytest.mark.parametrize("signed", [True, False])
def test_ten_gigabytes_are_refused_by_the_header_alone(open_server: tuple[Federation, RawClient], signed: bool) -> None:
    made, raw_client = open_server
    assert made.server is not None
    before = memory_of(made.server.pid)
    path = f"{TASK.format(run=RUN, attempt=0)}/chunks/{'00' * 32}" if signed else "/v1/enrol"
    method = "PUT" if signed else "POST"
    stamp = (
        Stamp(raw_client.id, raw_client.epoch, raw_client.counter + 1000, int(time.time()), bytes(64)).headers()
        if signed
        else {}
    )
    for length in ("10737418240", "99999999999999999999999", "-1", "1_000", "+5", "0x10"):
        start = time.monotonic()
        with RawConnection(made.port, made.certs) as line:
            line.say(request(method, path, b"", {**stamp, "content-length": length}))
            said = line.hear()
            assert said.status in (400, 413), (length, said)
            assert time.monotonic() - start < 5
            if length.startswith("1073"):
                with pytest.raises(OSError):  # who sends on regardless is cut off
                    for _ in range(200):
                        line.say(bytes(MEGABYTE))
    assert memory_of(made.server.pid) - before < 16 * MEGABYTE


def test_little_is_kept_of_those_who_have_no_session(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    stranger = RawClient(made.port, made.certs)
    path = f"{TASK.format(run=RUN, attempt=0)}/chunks/{'00' * 32}"
    data = stranger.signed("PUT", path, bytes(MEGABYTE), epoch=1)
    with RawConnection(made.port, made.certs) as line:
        line.say(data[:-MEGABYTE])  # the head alone
        said = line.hear()
        assert (said.status, said.error) == (401, "this server does not know this client: enrol it")
        line.say(data[-MEGABYTE:])  # it is dropped, and nobody hangs up: on a slow line too a client hears why
        line.say(request("GET", "/v1/about"))
        assert line.hear().status == 200
    for endpoint in ENDPOINTS:
        if endpoint.public:
            with RawConnection(made.port, made.certs) as line:
                line.say(request(endpoint.method, endpoint.path, b"", {"content-length": "100000"}))
                assert line.hear().status == 413
    assert raw_client.ask("PUT", path, bytes(MEGABYTE)).status in (410, 422)  # of a client it is read to the end


def test_a_body_without_a_length_is_refused(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    for headers in ({"transfer-encoding": "chunked"}, {"transfer-encoding": "chunked", "content-length": "5"}):
        with RawConnection(made.port, made.certs) as line:
            lines = {"host": "localhost", **headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            line.say(f"POST /v1/challenge HTTP/1.1\r\n{head}\r\n".encode() + b"100000\r\n" + bytes(1000))
            said = line.hear()
            assert said.status in (400, 413), said
    assert raw_client.plain("GET", "/v1/about").status == 200


TRICKS = (
    "..",
    "%2e%2e",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fserver.key",
    "%252e%252e",
    "..%5c..%5cserver.key",
    "/",
    "//",
    "%2f",
    ".",
    "%00",
    "law%00",
    "server.key%00",
    "x" * 5000,
    "%F0%9F%90%8B",
    "%ff%fe",
    "%c0%ae%c0%ae",
    "%E2%80%AE",
    "%EF%BC%91",
    "-1",
    "1e9",
    "99999999999999999999999999",
    "0%0a",
    "%20",
    "law;x",
    "law?x=1",
    "law%3Fx",
    "%",
    "%zz",
    "CON",
    "0000",
    "' OR 1=1 --".replace(" ", "%20"),
)


def test_tricks_in_paths_lead_nowhere(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    order = raw_client.order()
    real = {"run": RUN, "attempt": str(order.attempt), "name": order.model.name, "index": "0", "start": "0"}
    real |= {"digest": "00" * 32, "version": "0"}
    before = {path: path.stat().st_mtime_ns for path in made.home.rglob("*") if path.is_file()}
    tried = 0
    for endpoint in ENDPOINTS:
        for field in re.findall(r"{(\w+)}", endpoint.path):
            for trick in TRICKS:
                path = endpoint.path.format(**{**real, field: trick})
                said = raw_client.ask(endpoint.method, path, b"{}" if issubclass(endpoint.body, Message) else b"")
                harmless = (field, trick) in {("start", "0000"), ("index", "0000"), ("attempt", "0000")}
                harmless |= trick in ("law?x=1",) and field == "run"  # what comes after ? is not part of the path
                assert 400 <= said.status < 500 or harmless, (endpoint, field, trick, said)
                tried += 1
    assert tried > 500
    changed = {path.name for path in made.home.rglob("*") if path.is_file() and before.get(path) is None}
    assert not {name for name in changed if not name.startswith("store.db")}
    for raw in (b"GET /v1/runs/\xc3\xa9 HTTP/1.1\r\n", b"GET /v1/\0 HTTP/1.1\r\n", b"GET ../x HTTP/1.1\r\n"):
        with RawConnection(made.port, made.certs) as line:
            line.say(raw + b"host: localhost\r\n\r\n")
            assert line.hear().status in (0, 400, 404)
    assert raw_client.plain("GET", "/v1/about").status == 200


def bad_texts(kind: type[Message]) -> list[bytes]:
    """Bodies of which no message can be read: of letters that are none, and too deep."""
    names = [field.encode_name.encode() for field in msgspec.structs.fields(kind)]
    one = [b"{" + b",".join(b'"%s":"%s"' % (name, text) for name in names) + b"}" for text in LETTERS]
    deep = [b'{"unknown":' + b"[" * 50_000, b'{"unknown":' + b'{"a":' * 5_000, b"[" * 15_000]
    return [b"\xff\xfe", b'{"\xff":1}', b"\x80" * 100, b"", b"null", b"1e999", b'"', *one, *deep]


LETTERS = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", rb"\ud800", rb"\ud800\ud800", b"\0", b"\xf5\x80\x80\x80")


def test_texts_that_are_none_are_refused_by_every_request(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    order = raw_client.order()
    real = {"run": RUN, "attempt": str(order.attempt), "name": order.model.name, "index": "0", "start": "0"}
    real |= {"digest": "00" * 32, "version": "0"}
    tried = 0
    for endpoint in ENDPOINTS:
        path = endpoint.path.format(**real)
        for body in bad_texts(endpoint.body) if issubclass(endpoint.body, Message) else []:
            ask = raw_client.plain if endpoint.public else raw_client.ask
            said = ask(endpoint.method, path, body)
            cut_off = endpoint.public and len(body) > endpoint.max_body  # whose line is cut while it still sends
            refused = (400, 404, 409, 410, 413, 422, *((0,) if cut_off else ()))
            assert said.status in refused, (endpoint, body[:60], said)
            tried += 1
        for odd in (b"\xff\xfe", b"%ff", b"a=%c3&b=\xed\xa0\x80", b"\xf5=1"):
            with RawConnection(made.port, made.certs) as line:
                line.say(request(endpoint.method, path).replace(b" HTTP/1.1", b"?" + odd + b" HTTP/1.1", 1))
                assert line.hear().status in (200, 400, 401, 413), (endpoint, odd)
            for header in (b"atoll-told", b"atoll-client", b"atoll-body", b"x-other", b"atoll-protocol", b"accept"):
                signed = raw_client.signed(endpoint.method, path, b"")
                said = raw_client.send(signed.replace(b"\r\n\r\n", b"\r\n" + header + b": " + odd + b"\r\n\r\n", 1))
                assert said.status < 500, (endpoint, header, odd, said)
    assert tried > 120
    assert raw_client.plain("GET", "/v1/about").status == 200


@pytest.mark.parametrize("twice", ["content-length", "host", "atoll-client", "atoll-body", "atoll-counter"])
def test_a_header_that_counts_comes_once(open_server: tuple[Federation, RawClient], twice: str) -> None:
    made, raw_client = open_server
    data = raw_client.signed("POST", "/v1/poll", Poll(10, 0.0))
    name = re.search(rf"^{twice}: [^\r]*\r\n".encode(), data, re.MULTILINE)
    assert name is not None
    with RawConnection(made.port, made.certs) as line:
        line.say(data.replace(name[0], name[0] + name[0], 1))
        assert line.hear().status == 400
    assert raw_client.ask("POST", "/v1/poll", Poll(10, 0.0)).status == 200


def test_a_body_is_the_one_that_was_signed(open_server: tuple[Federation, RawClient]) -> None:
    _, raw_client = open_server
    for path, body in (
        ("/v1/poll", msgspec.json.encode(Poll(10, 0.0))),
        (f"{TASK.format(run=RUN, attempt=0)}/ready", b"x"),
    ):
        data = raw_client.signed("POST", path, body)
        said = raw_client.send(data[:-1] + b"!")
        assert (said.status, "not the one that atoll-body names" in said.error) == (400, True)
    old = re.sub(rb"atoll-body: [^\r]*\r\n", b"", raw_client.signed("POST", "/v1/poll", Poll(10, 0.0)))
    said = raw_client.send(old)
    assert (said.status, "same version of Atoll" in said.error) == (426, True)


def test_what_is_not_http_or_not_tls_is_hung_up_on(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    for data in (b"\x16\x03\x01" + bytes(500), b"GET /v1/about HTTP/1.1\r\nhost: x\r\n\r\n", b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", made.port), timeout=10) as plain:
            plain.sendall(data)
            try:
                heard = plain.recv(1 << 16)
            except ConnectionError:
                heard = b""
            assert b"200" not in heard
    long = b"GET /v1/about HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 300_000 + b"\r\n\r\n"
    for data in (b"\0" * 100 + b"\r\n\r\n", b"NOTHING\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * (1 << 20), long):
        with RawConnection(made.port, made.certs) as line:
            try:
                line.say(data)
            except OSError:
                continue
            assert line.hear().status in (0, 400, 404, 431)
    assert raw_client.plain("GET", "/v1/about").status == 200
    for text in (made.root / "server.out").read_text().splitlines():
        assert text.startswith("serving") or json.loads(text)["event"] != "rejected", text


def test_who_wants_another_protocol_gets_this_one(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    for name in ("websocket", "h2c"):
        with RawConnection(made.port, made.certs) as line:
            line.say(request("GET", "/v1/about", b"", {"connection": "Upgrade", "upgrade": name}))
            assert line.hear().status == 200
    assert raw_client.plain("GET", "/v1/about").status == 200


def test_one_client_has_few_bodies_in_memory(open_server: tuple[Federation, RawClient]) -> None:
    made, raw_client = open_server
    path = f"{TASK.format(run=RUN, attempt=0)}/chunks/{'00' * 32}"
    lines: list[RawConnection] = []

    def begin() -> None:
        lines.append(RawConnection(made.port, made.certs))
        lines[-1].say(raw_client.signed("PUT", path, bytes(MEGABYTE))[: -MEGABYTE // 2])  # and not the rest

    def is_refused() -> bool:
        begin()  # one that came before others were authenticated may have been refused
        return raw_client.ask("PUT", path, bytes(MEGABYTE)).status == 429

    for _ in range(MAX_BODIES_PER_CLIENT - 1):
        begin()
    until(is_refused, 10, "no more bodies to be taken")
    assert raw_client.ask("POST", "/v1/poll", Poll(10, 0.0)).status == 200
    for line in lines:
        line.close()
    until(lambda: raw_client.ask("PUT", path, bytes(MEGABYTE)).status in (410, 422), 10, "room again")


def test_five_hundred_slow_lorises_do_not_keep_an_honest_client_waiting(made: Federation) -> None:
    (raw_client,) = approved_raw_clients(made, 1)
    server = made.serve("--clients", "1")
    raw_client.begin()
    raw_client.orders(0)
    raw_client.order()
    before = memory_of(server.pid)
    with lorises(made, 500) as num:
        assert num() == 500
        start = time.monotonic()
        for _ in range(10):
            assert raw_client.deliver(raw_client.order(), constant_update(0.5)).status == 200
        seconds = time.monotonic() - start
        assert num() == 500
        assert memory_of(server.pid) - before < 100 * MEGABYTE
    raw_client.order()
    assert len(made.commits()) == 10
    assert seconds < 20


@pytest.mark.slow
def test_slow_lorises_are_cut_off(made: Federation) -> None:
    approved_raw_clients(made, 1)
    made.serve("--clients", "1")
    with lorises(made, 500) as num:
        until(lambda: num() == 0, 60, "the end of the lorises")


@contextmanager
def lorises(made: Federation, num: int) -> Iterator[Callable[[], int]]:
    """Half of them drip the head of a request, a quarter its body, a quarter never say hello; how many are left."""
    lines: list[Any] = []
    going = threading.Event()

    def drip() -> None:
        while not going.wait(0.5):
            for line in list(lines):
                try:
                    if isinstance(line, RawConnection):
                        line.say(b"x")
                    elif line.recv(1, socket.MSG_PEEK) == b"":
                        raise OSError("cut off")
                except BlockingIOError:
                    pass
                except OSError:
                    lines.remove(line)

    for index in range(num):
        if index % 4 == 3:
            silent = socket.create_connection(("127.0.0.1", made.port), timeout=20)
            silent.setblocking(False)
            lines.append(silent)
            continue
        line = RawConnection(made.port, made.certs)
        head = b"POST /v1/challenge HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n"
        line.say(head + (b"x-header: " if index % 2 else b"\r\n"))
        lines.append(line)
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield lambda: len(lines)
    finally:
        going.set()
        thread.join()
        for line in lines:
            line.close()
