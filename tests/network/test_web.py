"""A real server on a real socket: slow, large and wrong requests do it no harm."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import RunError
from atoll.network.server.certs import make_certificates
from atoll.network.server.limits import Limits
from atoll.network.server.web import (
    CONNECTION,
    LIMITS,
    RequestTimeouts,
    TooLarge,
    content_length,
    listening_socket,
    read_body,
    tls_context,
    web_server,
)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body, of at most 1,000 bytes; /wait answers a little later."""
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    try:
        status, body = 200, str(len(await read_body(receive, content_length(headers, 1000)))).encode()
    except TooLarge as error:
        status, body = 413, str(error).encode()
    if scope["path"].startswith("/known/"):
        scope["extensions"][CONNECTION].authenticate(scope["path"][7:])
    if scope["path"] == "/wait":
        await asyncio.sleep(1.5)
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(
    tls: ssl.SSLContext | None = None,
    seconds: float = 0.7,
    limits: Limits = LIMITS,
    timeouts: RequestTimeouts | None = None,
) -> Iterator[int]:
    with listening_socket("127.0.0.1", 0) as listener:
        server = web_server(echo, "127.0.0.1", 0, tls, timeouts or RequestTimeouts(head=seconds, body=seconds), limits)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def say(port: int, text: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(text)
    return connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return 0, data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while sizes and len(body) < int(sizes[0].split(b":")[1]):
        body += connection.recv(65536)
    return int(head.split()[1]), body


def post(size: int, path: str = "/") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * size


def test_requests_are_answered_one_after_another_on_one_connection() -> None:
    with serving() as port, say(port, post(10)) as connection:
        assert answer(connection) == (200, b"10")
        time.sleep(1.0)  # longer than a request may take: between two requests there is more time
        connection.sendall(post(999))
        assert answer(connection) == (200, b"999")


def test_answers_are_not_held_back() -> None:
    with serving() as port, say(port, b"") as connection:
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            connection.sendall(post(5))
            assert answer(connection) == (200, b"5")
            seconds.append(time.monotonic() - began)
        assert sorted(seconds)[5] < 0.03  # 40 ms each, if a header waited for its acknowledgement


def test_a_request_that_is_whole_may_wait_for_its_answer() -> None:
    with serving() as port, say(port, post(3, "/wait")) as connection:
        assert answer(connection) == (200, b"3")


@pytest.mark.parametrize(
    "start",
    [
        *(pytest.param(start, marks=pytest.mark.slow) for start in (b"", b"POST / HT")),
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc",
    ],
)
def test_who_drips_is_cut_off_and_nobody_else_waits(start: bytes) -> None:
    with serving(seconds=1.5) as port:
        slow = [say(port, start) for _ in range(50)]
        began = time.monotonic()
        with say(port, post(5)) as quick:
            assert answer(quick) == (200, b"5")
        assert time.monotonic() - began < 1.2
        for turn in range(40):
            time.sleep(0.1)
            if turn == 3 and start.startswith(b"POST / HTTP"):
                for connection in slow:
                    connection.sendall(b"d")  # a byte now and then does not buy more time
            if time.monotonic() - began > 2.2:
                break
        for connection in slow:
            with suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
            connection.close()


def test_a_body_has_time_as_long_as_it_comes_fast_enough() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
    timeouts = RequestTimeouts(head=30, body=0.6, rate=100)
    with serving(timeouts=timeouts) as port, say(port, head) as fast, say(port, head) as slow:
        for _ in range(9):  # 100 bytes buy a second
            fast.sendall(b"x" * 100)
            with suppress(OSError):
                slow.sendall(b"x")
            time.sleep(0.12)
        assert answer(fast) == (200, b"900")
        with suppress(ConnectionResetError):
            assert slow.recv(1000) == b""


def test_the_oldest_stranger_goes_and_no_client() -> None:
    limits = Limits(unauthenticated=4, address=3, client=2)
    with serving(seconds=30, limits=limits) as port, ExitStack() as stack:

        def known(name: str) -> socket.socket:
            connection = stack.enter_context(say(port, post(3, f"/known/{name}")))
            assert answer(connection) == (200, b"3")
            return connection

        client = known("one")
        strangers = [stack.enter_context(say(port, b"")) for _ in range(5)]
        for connection in strangers[:2]:
            assert connection.recv(100) == b""  # two too many: the oldest are hung up on
        for connection in (client, *strangers[2:]):
            connection.sendall(post(7))
            assert answer(connection) == (200, b"7")
        more = [known("one"), known("one")]  # of one client two are kept
        assert client.recv(100) == b""
        for connection in (*more, known("two")):
            connection.sendall(post(5))
            assert answer(connection) == (200, b"5")


def test_empty_lines_are_no_request_and_buy_no_time() -> None:
    with serving(seconds=1.0) as port, say(port, post(5)) as connection:
        assert answer(connection) == (200, b"5")
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 5:
                connection.sendall(b"\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        post(1001),
    ],
)
def test_a_body_that_is_too_long_is_refused_before_it_is_read(request_: bytes) -> None:
    with serving() as port, say(port, request_) as connection:
        status, text = answer(connection)
        assert status == 413 and b"at most 1,000" in text


def test_a_head_that_does_not_end_is_cut_off() -> None:
    with serving(seconds=30) as port, say(port, b"POST / HTTP/1.1\r\nHost: x\r\n") as connection:
        with suppress(OSError):
            for number in range(100):
                connection.sendall(b"x-%d: " % number + b"y" * 5000 + b"\r\n")
        with suppress(ConnectionResetError):
            status, text = answer(connection)
            assert (status, b"does not end" in text) == (400, True)
    with serving() as port, say(port, b"") as connection:
        for _ in range(40):  # long heads one after another are fine
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 5000 + b"\r\nContent-Length: 1\r\n\r\nx")
            assert answer(connection) == (200, b"1")


@pytest.mark.parametrize("rubbish", [b"\0" * 100 + b"\r\n\r\n", b"hello\r\n\r\n", b"A" * 200_000])
def test_rubbish_is_refused(rubbish: bytes) -> None:
    with serving() as port:
        with say(port, rubbish) as connection:
            assert answer(connection)[0] in (0, 400)
        with say(port, post(1)) as connection:
            assert answer(connection) == (200, b"1")


def test_tls_is_version_13_or_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], datetime.datetime.now(datetime.UTC))
    with serving(tls_context(tmp_path / "server.pem", tmp_path / "server.key")) as port:
        modern = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with modern.wrap_socket(say(port, b""), server_hostname="localhost") as connection:
            connection.sendall(post(7))
            assert answer(connection) == (200, b"7") and connection.version() == "TLSv1.3"
        old = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            old.wrap_socket(say(port, b""), server_hostname="localhost")


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="atoll certs"):
        web_server(echo, "0.0.0.0", 0, None)
    with pytest.raises(RunError, match="cannot be used"):
        tls_context(tmp_path / "no.pem", tmp_path / "no.key")
