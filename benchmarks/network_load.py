"""A server under load: many connected clients over TLS, updates of mlp_2nn from all of them, and where the time goes.

    python benchmarks/network_load.py [--clients 1000] [--rounds 3] [--profile]

The server is the real one, in a process of its own. Clients are light: one process speaks the protocol for all of them,
each with a key and a TLS connection of its own, and sends a ready-made update instead of training.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.network.gate import session_request
from atoll.network.identity import Stamp, client_id, public_bytes, sign
from atoll.network.objects import manifest_of
from atoll.network.protocol import Challenge, Delivery, Hello, Nonce, Order, Orders, Poll, Welcome, update_text
from atoll.network.store import Store

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


class Light:
    """One client: its key, its connection and its update."""

    def __init__(self, number: int, port: int, tls: ssl.SSLContext, vector: np.ndarray) -> None:
        self.number, self._port, self._tls = number, port, tls
        self.key = Ed25519PrivateKey.generate()
        self.id = client_id(public_bytes(self.key))
        self._vector = vector
        self._epoch = self._counter = 0

    async def connect(self) -> None:
        """Open the connection, and begin a session."""
        self._in, self._out = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname="localhost", limit=1 << 18
        )
        nonce = msgspec.json.decode(await self._post("/v1/challenge", Challenge(self.id)), type=Nonce).nonce
        hello = Hello(self.id, nonce, self.key.sign(session_request(self.id, nonce)))
        self._epoch = msgspec.json.decode(await self._post("/v1/session", hello), type=Welcome).epoch

    async def poll(self, wait: float) -> Orders:
        """Ask for work."""
        return msgspec.json.decode(await self._post("/v1/poll", Poll(600, wait)), type=Orders)

    async def deliver(self, order: Order) -> None:
        """Send the update."""
        import torch

        from atoll.core.messages import Payload
        from atoll.core.wire import pack

        mine = self._vector.copy()
        mine[:2] = self.number, order.attempt
        data = pack(Payload(torch.from_numpy(mine)))
        manifest = manifest_of(data)
        path = f"/v1/runs/load/tasks/{order.attempt}"
        for digest in manifest.chunks:
            await self._request("PUT", f"{path}/chunks/{digest.hex()}", data)
        told = Delivery(msgspec.msgpack.encode(manifest), 600, 0.5, 600.0, bytes(64))
        text = update_text("load", order.attempt, order.version, manifest.name(), told)
        await self._post(f"{path}/update", msgspec.structs.replace(told, signature=self.key.sign(text)))

    async def _post(self, path: str, message: msgspec.Struct) -> bytes:
        return await self._request("POST", path, msgspec.json.encode(message))

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        headers = {"host": "localhost", "content-length": str(len(body)), "atoll-protocol": "1"}
        if self._epoch:
            self._counter += 1
            stamp = Stamp(self.id, self._epoch, self._counter, int(time.time()))
            headers |= sign(self.key, stamp, method, path, body).headers()
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        self._out.write(head.encode())
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
            raise RuntimeError(f"{method} {path}: {status} {answer!r}")
        return answer


def memory(pid: int) -> float:
    """Resident MB of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("VmRSS"))


def cpu(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(clients: list[Light], server: subprocess.Popen[bytes], rounds: int) -> dict[str, float]:
    """Connect everybody, wait, then let them deliver round after round."""
    start = memory(server.pid)
    began = time.perf_counter()
    gate = asyncio.Semaphore(50)

    async def connect(client: Light) -> None:
        async with gate:
            await client.connect()

    *rest, last = clients
    await asyncio.gather(*(connect(client) for client in clients))
    connected = time.perf_counter() - began
    waiting = [asyncio.create_task(client.poll(25.0)) for client in rest]
    await asyncio.sleep(3.0)
    found = {"start MB": start, "waiting MB": memory(server.pid), "connect s": connected}
    busy, lock = 0.0, asyncio.Semaphore(16)
    times: list[tuple[float, float]] = []
    orders = [await last.poll(0.0), *await asyncio.gather(*waiting)]
    everybody = [last, *rest]
    for _ in range(rounds):
        while any(not each.orders for each in orders):
            again = [i for i, each in enumerate(orders) if not each.orders]
            polled = await asyncio.gather(*(everybody[i].poll(25.0) for i in again))
            for i, each in zip(again, polled, strict=True):
                orders[i] = each
        began, used = time.perf_counter(), cpu(server.pid)

        async def deliver(client: Light, order: Order) -> None:
            async with lock:
                await client.deliver(order)

        await asyncio.gather(*(deliver(c, o.orders[0]) for c, o in zip(everybody, orders, strict=True)))
        times.append((time.perf_counter() - began, cpu(server.pid) - used))
        orders = list(await asyncio.gather(*(client.poll(25.0) for client in everybody)))
    best, busy = min(times)
    size = clients[0]._vector.nbytes
    found |= {
        "updates/s": len(clients) / best,
        "MB/s": len(clients) * size / best / 1e6,
        "server ms an update": 1000 * busy / len(clients),
        "after MB": memory(server.pid),
    }
    return found


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="Show where the server spends its time.")
    told = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atoll-load-"))
    port = 18443
    try:
        (home / "plan.toml").write_text(PLAN.format(rounds=told.rounds))
        atoll = [sys.executable, "-m", "atoll.cli.main"]
        subprocess.run(
            [*atoll, "certs", str(home / "certs"), "--host", "localhost"], check=True, stdout=subprocess.DEVNULL
        )
        tls = ssl.create_default_context(cafile=home / "certs" / "ca.pem")
        vector = np.random.default_rng(0).standard_normal(199_210).astype(np.float32)
        clients = [Light(number, port, tls, vector) for number in range(told.clients)]
        store = Store(f"sqlite:///{home}/store.db")
        with store.change() as book:
            for client in clients:
                book.add_client(client.id, f"client {client.number}", public_bytes(client.key))
                book.approve(client.id)
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
        run = [sys.executable, "-m", "cProfile", "-o", str(home / "profile")] if told.profile else [sys.executable]
        with (home / "log").open("wb") as log:
            server = subprocess.Popen([*run, "-m", "atoll.cli.main", *command], stdout=subprocess.PIPE, stderr=log)
        assert server.stdout is not None and b"serving" in server.stdout.readline(), (home / "log").read_text()
        found = asyncio.run(drive(clients, server, told.rounds))
        found["floor ms an update"] = floor_ms(vector.nbytes)
        server.terminate()
        server.wait(60)
        for name, value in found.items():
            print(f"{name:22} {value:10.2f}")
        seconds = [
            json.loads(line)["round_seconds"] for line in (home / "runs/load/metrics.jsonl").read_text().splitlines()
        ]
        print("round seconds         ", seconds)
        if told.profile:
            import pstats

            pstats.Stats(str(home / "profile")).sort_stats("tottime").print_stats(25)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
