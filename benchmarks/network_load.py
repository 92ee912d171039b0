"""A server under load: many connected clients over TLS, updates of mlp_2nn from all of them, and where the time goes.

    python benchmarks/network_load.py [--clients 1000] [--rounds 5] [--profile] [--pages 50]

The server is the real one, in a process of its own. Clients are light: one process speaks the protocol for all of them,
each with a key and a TLS connection of its own, and sends a ready-made update instead of training. A round begins when
all have their orders and updates, all send at once, and it is over when the updates are folded and all have their next
orders.
With --pages so many live pages are open in every second round, each with the clients and the rows of the run, and
rounds with and without are compared.
With --profile (Linux's perf must be installed) it is shown in what code the server spends its processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.messages import Payload
from atoll.core.wire import pack
from atoll.network.protocol import endpoints
from atoll.network.protocol.identity import Stamp, client_id, public_bytes, session_request, sign
from atoll.network.protocol.messages import (
    Challenge,
    Delivery,
    Hello,
    Nonce,
    Order,
    Orders,
    Poll,
    Welcome,
    update_text,
)
from atoll.network.protocol.objects import manifest_of
from atoll.network.protocol.operator import address_of
from atoll.network.server.access import Access
from atoll.network.server.store import Store
from atoll.ui.serving import local_link

PLAN = """
name = "load"
rounds = {rounds}
data = "mnist"
model = "mlp_2nn"
[policy]
name = "cohort"
[evaluation]
every = 0
"""


class RawClient:
    """One client: its key, its connection and its update."""

    def __init__(self, number: int, port: int, tls: ssl.SSLContext, vector: np.ndarray) -> None:
        self.number, self._port, self._tls = number, port, tls
        self.key = Ed25519PrivateKey.generate()
        self.id = client_id(public_bytes(self.key))
        self._vector, self.num_bytes = vector, vector.nbytes
        self._epoch = self._counter = 0
        self._update = b"", b""

    async def connect(self) -> None:
        """Open the connection, and begin a session."""
        self._in, self._out = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname="localhost", limit=1 << 18
        )
        nonce = msgspec.json.decode(await self._post(endpoints.CHALLENGE, Challenge(self.id)), type=Nonce).nonce
        hello = Hello(self.id, nonce, self.key.sign(session_request(self.id, nonce)))
        self._epoch = msgspec.json.decode(await self._post(endpoints.SESSION, hello), type=Welcome).epoch

    async def poll(self, wait: float) -> Orders:
        """Ask for work."""
        return msgspec.json.decode(await self._post(endpoints.POLL, Poll(600, wait)), type=Orders)

    def prepare(self, order: Order) -> None:
        """Make and sign the update, which clients do on machines of their own."""
        mine = self._vector.copy()
        mine[:2] = self.number, order.attempt
        data = pack(Payload(torch.from_numpy(mine)))
        manifest = manifest_of(data)
        told = Delivery(msgspec.msgpack.encode(manifest), 600, 0.5, 600.0, bytes(64))
        text = update_text("load", order.attempt, order.version, manifest.name(), told)
        told = msgspec.structs.replace(told, signature=self.key.sign(text))
        header = {endpoints.METADATA_HEADER: msgspec.json.encode(told).decode()}
        path = endpoints.PUT_UPDATE.url(run="load", attempt=order.attempt)
        self._update = self._head("PUT", path, data, header), data

    async def deliver(self) -> None:
        """Send the update."""
        await self._answer(*self._update)

    async def _post(self, endpoint: endpoints.Endpoint[Any, Any], message: msgspec.Struct) -> bytes:
        body = msgspec.json.encode(message)
        return await self._answer(self._head(endpoint.method, endpoint.path, body, {}), body)

    def _head(self, method: str, path: str, body: bytes, more: dict[str, str]) -> bytes:
        headers = {"host": "localhost", "content-length": str(len(body)), "atoll-protocol": "1", **more}
        if self._epoch:
            self._counter += 1
            stamp = Stamp(self.id, self._epoch, self._counter, int(time.time()))
            headers |= sign(self.key, stamp, method, path, body).headers()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()

    async def _answer(self, head: bytes, body: bytes) -> bytes:
        self._out.write(head)
        self._out.write(body)
        await self._out.drain()
        status = int((await self._in.readline()).split()[1])
        length = 0
        while (line := await self._in.readline()) != b"\r\n":
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
        answer = await self._in.readexactly(length)
        if status != 200:
            raise RuntimeError(f"{head.splitlines()[0]!r}: {status} {answer!r}")
        return answer


def memory(pid: int, line: str = "VmRSS") -> float:
    """Resident MB of a process; the most there ever were with VmHWM."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(each.split()[1]) / 1000 for each in file if each.startswith(line))


def cpu(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class LivePages:
    """Browsers that show a run and the clients of a federation."""

    def __init__(self, home: Path, num: int) -> None:
        self._num, self._tasks = num, list[asyncio.Task[None]]()
        self.num_bytes = 0
        if not num:
            return
        link = local_link(Access(home), int(address_of(home).url.rpartition(":")[2]))
        self._host = link.removeprefix("http://").partition("/")[0]
        self._cookies = []
        with httpx2.Client(base_url=f"http://{self._host}", trust_env=False) as http:
            for _ in range(num):  # a browser each
                answer = http.post("/ui/api/session", json={"token": link.rpartition("=")[2]}).raise_for_status()
                self._cookies.append(answer.headers["set-cookie"].partition(";")[0])

    async def open(self) -> None:
        """Open all, and wait until each has seen something."""
        seen = [asyncio.Event() for _ in range(self._num)]
        self._tasks = [asyncio.create_task(self._show(*each)) for each in zip(self._cookies, seen, strict=True)]
        await asyncio.gather(*(each.wait() for each in seen))

    async def close(self) -> None:
        """Close all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _show(self, cookie: str, seen: asyncio.Event) -> None:
        source, out = await self._ask(cookie, "/ui/api/stream?follow=load")
        try:
            while line := await source.readline():
                self.num_bytes += len(line)
                if line.startswith(b"event: clients"):  # as the page does, it reads them again
                    clients, other = await self._ask(cookie, "/ui/api/clients")
                    self.num_bytes += len(await clients.read())
                    other.close()
                seen.set() if line.startswith(b"data: ") else None
        finally:
            out.close()

    async def _ask(self, cookie: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._host.split(":")
        source, out = await asyncio.open_connection(host, int(port), limit=1 << 24)
        head = f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\ncookie: {cookie}\r\nconnection: close\r\n\r\n"
        out.write(head.encode())
        assert b" 200 " in await source.readline()
        return source, out


async def drive(
    clients: list[RawClient],
    server: subprocess.Popen[bytes],
    rounds: int,
    watch: Callable[[], None],
    pages: LivePages,
    num_pages: int,
) -> dict[str, float]:
    """Connect everybody, wait, then let them deliver round after round; `watch` is called before the first."""
    found = {"MB before they come": memory(server.pid)}
    began = time.perf_counter()
    authenticator = asyncio.Semaphore(50)

    async def connect(client: RawClient) -> None:
        async with authenticator:
            await client.connect()

    *rest, last = clients
    await asyncio.gather(*(connect(client) for client in clients))
    found["s to connect"] = time.perf_counter() - began
    waiting = [asyncio.create_task(client.poll(25.0)) for client in rest]
    await asyncio.sleep(3.0)
    found["MB while all wait"] = memory(server.pid)
    times: list[tuple[float, float]] = []
    orders = {last: await last.poll(0.0), **dict(zip(rest, await asyncio.gather(*waiting), strict=True))}

    async def ordered(client: RawClient) -> None:
        while not orders[client].orders:
            orders[client] = await client.poll(25.0)

    async def deliver(client: RawClient) -> None:
        await client.deliver()
        orders[client] = await client.poll(25.0)

    watch()
    for number in range(rounds - 1):  # after the last round there are no orders
        await asyncio.gather(*map(ordered, clients))
        if num_pages and number % 2:
            await pages.open()
        for client in clients:
            client.prepare(orders[client].orders[0])
        began, used = time.perf_counter(), cpu(server.pid)
        await asyncio.gather(*map(deliver, clients))
        await asyncio.gather(*map(ordered, clients))
        times.append((time.perf_counter() - began, cpu(server.pid) - used))
        await pages.close()
    if num_pages:
        with_pages, without = (np.median(times[start::2], axis=0) for start in (1, 0))
        found |= {
            "ms a round, no page open": 1000 * without[0],
            f"ms a round, {num_pages} pages open": 1000 * with_pages[0],
            "ratio of rounds a minute": without[0] / with_pages[0],
            "server's processor ms, no page": 1000 * without[1],
            f"server's processor ms, {num_pages} pages": 1000 * with_pages[1],
            "MB sent to pages": pages.num_bytes / 1e6,
        }
    best, busy = min(times)
    return found | {
        "updates/s": len(clients) / best,
        "MB/s": len(clients) * clients[0].num_bytes / best / 1e6,
        "MB at most": memory(server.pid, "VmHWM"),
        "server ms an update": 1000 * busy / len(clients),
    }


GROUPS = {
    "hashing and TLS": ("libcrypto", "libssl", "_hashlib", "_ssl"),
    "signatures": ("_rust",),
    "kernel: sockets, disk, threads": ("[kernel", "[vdso]"),
    "Python": ("libpython", "python3", "_asyncio", "parser", "_core", "_queue", "_struct", "_json"),
    "copying and allocating": ("libc.so", "libc-"),
    "reading and folding updates": ("libtorch", "libc10", "_multiarray", "libmkl", "libgomp", "libstdc++"),
    "store": ("sqlite",),
}


def profile(data: Path) -> dict[str, float]:
    """In what code samples of perf lie, in percent."""
    command = ["perf", "report", "-i", str(data), "--sort", "dso", "--stdio"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = {}
    for line in said.splitlines():
        share, _, name = line.strip().partition("%")
        if name and not line.startswith("#"):
            kind = next((kind for kind, names in GROUPS.items() if any(each in name for each in names)), "other")
            found[kind] = found.get(kind, 0.0) + float(share)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def floor_ms(size: int) -> float:
    """What hashing and decrypting an update take at least, in ms: twice SHA-256, once AES-256-GCM."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data, aead = os.urandom(size), AESGCM(bytes(32))
    sealed = aead.encrypt(bytes(12), data, None)
    began = time.perf_counter()
    for _ in range(20):
        hashlib.sha256(data).digest()
        hashlib.sha256(data).digest()
        aead.decrypt(bytes(12), sealed, None)
    return (time.perf_counter() - began) / 20 * 1000


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=0, help="Live pages that are open in every second round.")
    parser.add_argument("--profile", action="store_true", help="Show where the server spends its time.")
    told = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atoll-load-"))
    port, server = 18443, None
    try:
        (home / "plan.toml").write_text(PLAN.format(rounds=told.rounds))
        atoll = [sys.executable, "-m", "atoll.cli.main"]
        subprocess.run(
            [*atoll, "certs", str(home / "certs"), "--host", "localhost"], check=True, stdout=subprocess.DEVNULL
        )
        tls = ssl.create_default_context(cafile=home / "certs" / "ca.pem")
        vector = np.random.default_rng(0).standard_normal(199_210).astype(np.float32)
        clients = [RawClient(number, port, tls, vector) for number in range(told.clients)]
        store = Store(f"sqlite:///{home}/store.db")
        with store.write() as tables:
            for client in clients:
                tables.add_client(client.id, f"client {client.number}", public_bytes(client.key))
                tables.approve(client.id)
        store.close()
        command = [
            "serve",
            str(home / "plan.toml"),
            "--home",
            str(home),
            "--port",
            str(port),
            "--clients",
            str(told.clients),
        ]
        command += ["--cert", str(home / "certs/server.pem"), "--key", str(home / "certs/server.key")]
        with (home / "log").open("wb") as log:
            server = subprocess.Popen([*atoll, *command], stdout=subprocess.PIPE, stderr=log)
        assert server.stdout is not None and b"serving" in server.stdout.readline(), (home / "log").read_text()
        watching: list[subprocess.Popen[bytes]] = []

        def watch() -> None:
            if told.profile:
                perf = ["perf", "record", "-q", "-F", "997", "-p", str(server.pid), "-o", str(home / "perf.data")]
                watching.append(subprocess.Popen(perf))

        pages = LivePages(home, told.pages)
        found = asyncio.run(drive(clients, server, told.rounds, watch, pages, told.pages))
        found["ms to hash and decrypt one"] = floor_ms(vector.nbytes)
        for each in watching:
            each.send_signal(signal.SIGINT)
            each.wait(60)
        for name, value in found.items():
            print(f"{name:30} {value:10.2f}")
        if told.profile:
            print("percent of the server's processor time in the rounds")
            for name, value in profile(home / "perf.data").items():
                print(f"{name:30} {value:10.1f}")
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
