"""Measure seconds a batch of split learning over a line with a real delay, beside what its model says.

    python benchmarks/split_latency.py --latency 0.02 --steps 30

A server in a process of its own, a client, and between them a proxy that passes on bytes half a round trip after they
came. `mlp_2nn` on MNIST-sized noise, batches of 64, cut behind the first layer. Each setting is measured without delay
and with it, in turns. The model is what docs/split.md says a batch takes beside computing: one round trip where all
pieces are on their way at once, one for each piece with in_flight = 1; without delay is what computing and requests
take on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import atoll
from atoll import Plan
from atoll.network.client import split_session
from atoll.network.client.app import ClientApp
from atoll.network.client.client import Client, OwnerOutput
from atoll.network.client.connection import Connection
from atoll.network.client.consent import every_run
from atoll.network.client.home import EnrolledServer, Home
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import Welcome
from atoll.network.server.http import ClientApi
from atoll.network.server.operations import Operations
from atoll.network.server.store import Store
from atoll.network.server.web import listening_socket, web_server

SPAWN = multiprocessing.get_context("spawn")
PIECES, BATCH, SKIPPED = 8, 64, 3
"""Pieces of a batch, samples of it, and batches at the start that are not measured, when connections are opened."""


def pass_on(target: int, delay: float, pipe: Any, counted: Any) -> None:
    """Pass on bytes half a round trip after they came, each way, in a process of its own."""

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            counted.value += len(data)
            loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", target)
        # asyncio does so for sockets that it made; else the second part of an answer would wait for an acknowledgement
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            await asyncio.gather(through(reader, to_there), through(there, writer))

    async def serving() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serving())


def serve(home: Path, plan: Plan, pipe: Any) -> None:
    """Serve a plan to one client, in a process of its own."""
    operations = Operations(home, Store(f"sqlite:///{home}/store.db"), num_clients=1)
    operations.start()
    api, listener = ClientApi(operations), listening_socket("127.0.0.1", 0)
    server = web_server(api.app, "127.0.0.1", 0, None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    pipe.send((listener.getsockname()[1], operations.token(600), operations.server_key))
    operations.approve([pipe.recv()])
    operations.add_run("latency", plan)
    pipe.recv()
    rows = operations.driver.built_runs()[0].files.last_row
    pipe.send(rows)
    api.end()
    server.should_exit = True
    thread.join()
    operations.close()


def measured(plan: Plan, latency: float) -> tuple[float, float, dict[str, Any]]:
    """Return seconds a batch of the fastest fifth, as others may use the machine, processor seconds, and the row."""
    moments: list[tuple[float, float]] = []
    side = split_session.client_side

    def noting(*args: Any) -> Any:
        machine = side(*args)

        def load(step: int) -> Any:
            moments.append((time.perf_counter(), time.process_time()))
            return machine.load(step)

        return replace(machine, load=load)

    split_session.client_side = noting
    counted = SPAWN.Value("q", 0)
    (ours, theirs), (passed, passing) = SPAWN.Pipe(), SPAWN.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "server").mkdir()
        process = SPAWN.Process(target=serve, args=(path / "server", plan, theirs))
        process.start()
        try:
            port, token, server_key = ours.recv()
            line = SPAWN.Process(target=pass_on, args=(port, latency / 2, passing, counted))
            line.start()
            join(path / "client", f"http://127.0.0.1:{passed.recv()}", token, server_key, ours)
            ours.send("end")
            row = ours.recv()
            line.kill()
        finally:
            split_session.client_side = side
            process.join(20)
            process.kill()
    pairs = list(zip(moments[SKIPPED:], moments[SKIPPED + 1 :], strict=False))
    walls = sorted(after[0] - before[0] for before, after in pairs)
    cpus = sorted(after[1] - before[1] for before, after in pairs)
    return walls[len(walls) // 5], cpus[len(cpus) // 2], {**row, "line_bytes": counted.value}


def join(path: Path, url: str, token: str, server_key: bytes, pipe: Any) -> None:
    """Enrol, and work until the run is over."""
    home = Home.make(path)
    quiet = OwnerOutput(lambda text: None, print)
    with Connection(url, home.key, server_key=server_key, say=quiet.warn) as connection:
        client = connection.enrol(token, "site")
        home.enrolled(EnrolledServer(url, server_key, client, "site"))
        pipe.send(client)
        welcome: Welcome = connection.welcome()
        assert welcome.number == 0
        app = ClientApp(**samples(), num_classes=10, floors=Floors(split="labels"), attributes=dict)
        site = Client(app, home, connection, quiet, sleep=lambda seconds: time.sleep(0.05), consent=every_run)
        site.run(once=True)
    home.close()


def samples() -> dict[str, Any]:
    """Make images of noise."""
    rng = np.random.default_rng(0)
    return {"train_x": rng.random((4096, 1, 28, 28), dtype=np.float32), "train_y": rng.integers(0, 10, 4096)}


def noise() -> atoll.Dataset:
    """Make the same as a data set of the server."""
    x, y = samples().values()
    return atoll.Dataset(name="noise", train_x=x, train_y=y, test_x=x[:64], test_y=y[:64], num_classes=10)


def plan_for(steps: int, in_flight: int | None, tail: str | None) -> Plan:
    """Return the plan of a setting."""
    return Plan(
        data="split_latency:noise",
        partition={"num_clients": 1},
        model="mlp_2nn",
        rounds=1,
        local={"steps": steps, "batch_size": BATCH, "lr": 0.01},
        policy={"name": "cohort", "size": 1},
        split={"cut": "2", "tail": tail, "micro_batches": PIECES, "in_flight": in_flight},
    )


def main() -> None:
    """Measure all settings, and print a table as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"one by one": (1, None, PIECES), "together": (None, None, 1), "together, with a tail": (None, "5", 2)}
    seconds: dict[str, float] = {}
    for name, (in_flight, tail, trips) in settings.items():
        plan, found = plan_for(args.steps, in_flight, tail), {}
        for _ in range(args.turns):
            for delay in (0.0, args.latency):
                wall, cpu, row = measured(plan, delay)
                found.setdefault(delay, []).append((wall, cpu))
        (bare, cpu), (delayed, _) = (
            (statistics.median(w for w, _ in found[d]), statistics.median(c for _, c in found[d]))
            for d in (0.0, args.latency)
        )
        seconds[name] = delayed
        told = {
            "setting": name,
            "round trips a batch": (row["round_trips"] - 1) / args.steps,
            "seconds a batch": round(delayed, 4),
            "without delay": round(bare, 4),
            "processor, client": round(cpu, 4),
            "of it by the line": round(delayed - bare, 4),
            "bytes of messages": row["bytes_up"] + row["bytes_down"],
            "bytes on the line": row["line_bytes"],
            "model": trips * args.latency,
            "line beside model": round((delayed - bare) / (trips * args.latency), 3),
            "all beside model and computing": round(delayed / (trips * args.latency + bare), 3),
        }
        print(json.dumps(told), flush=True)
    print(json.dumps({"gain by pipelining": round(seconds["one by one"] / seconds["together"], 2)}))


if __name__ == "__main__":
    main()
