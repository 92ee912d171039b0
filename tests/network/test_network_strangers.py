"""Strangers without a key, who say that they are a client: they cost a run nothing, however many they are."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from network.federation import RUN, Federation, federation, memory_of, until
from network.fork_server import ForkServer
from network.raw_client import TASK, RawClient, RawConnection, approved_raw_clients, packed, request

from atoll import Plan
from atoll.network.protocol.identity import Stamp
from atoll.network.server.limits import UNCOUNTED_BYTES

MANY = Plan(
    rounds=1_000_000,
    policy={"name": "cohort"},
    evaluation={"every": 0},
    model={"name": "mlp_2nn", "hidden": 64},
)
"""Everybody is asked; an update is too large to be read without having room for it."""
MEGABYTE = 1 << 20
ROUNDS = 5


@pytest.fixture
def made(processes: ForkServer, certs: Path, tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path / "f", processes, certs, MANY) as found:
        yield found


def at_work(made: Federation, num: int = 2, max_files: int = 0) -> list[RawClient]:
    """Clients that have joined a server that runs."""
    raw_clients = approved_raw_clients(made, num)
    made.serve("--clients", str(num), max_files=max_files)
    for raw_client in raw_clients:
        assert raw_client.begin().status == 200
        raw_client.orders(0)
    return raw_clients


def go_on(made: Federation, raw_clients: list[RawClient], rounds: int = ROUNDS) -> None:
    """Let clients do some rounds, in which no request of theirs is refused or made twice."""
    done = len(made.commits())
    for _ in range(rounds):
        orders = [raw_client.order() for raw_client in raw_clients]
        num_params = raw_clients[0].model(orders[0]).numel()
        data = packed(torch.rand(num_params))
        assert len(data) > UNCOUNTED_BYTES
        for raw_client, order in zip(raw_clients, orders, strict=True):
            said = raw_client.deliver(order, data)
            assert said.status == 200, said
    raw_clients[0].order()
    assert len(made.commits()) == done + rounds


def pretended(client: str, counter: int = 1, length: int = MEGABYTE) -> bytes:
    """The head of a request to send a chunk, in the name of a client whose key nobody has; and not its body."""
    path = f"{TASK.format(run=RUN, attempt=0)}/chunks/{'00' * 32}"
    stamp = Stamp(client, 1, counter, int(time.time()), bytes(64)).headers()
    return request("PUT", path, b"", {**stamp, "content-length": str(length)})


@pytest.mark.parametrize("num", [4, 400])
def test_idle_bodies_in_a_clients_name_take_nothing_from_it(made: Federation, num: int) -> None:
    raw_clients = at_work(made)
    assert made.server is not None
    before = memory_of(made.server.pid)
    with ExitStack() as stack:
        lines = [stack.enter_context(RawConnection(made.port, made.certs)) for _ in range(num)]
        for index, line in enumerate(lines):
            line.say(pretended(raw_clients[0].id, index + 1) + bytes(1000))
        go_on(made, raw_clients)
        for line in lines[-4:]:
            said = line.hear()
            assert (said.status, "not signed with this client's key" in said.error) == (401, True)
        assert memory_of(made.server.pid) - before < 100 * MEGABYTE


def test_slow_heads_slow_bodies_and_half_open_connections(made: Federation) -> None:
    """Hold more connections than the server may have open files: clients still come back and go on."""
    raw_clients = at_work(made, max_files=128)
    with ExitStack() as stack:
        for index in range(80):
            line = stack.enter_context(RawConnection(made.port, made.certs))
            line.say(b"POST /v1/challenge HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n" + b"\r\n" * (index % 2))
        for _ in range(80):  # TCP and nothing else
            stack.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=20))
        for raw_client in raw_clients:
            raw_client.hang_up()
        go_on(made, raw_clients)
    assert "Traceback" not in (made.root / "server.out").read_text()


@contextmanager
def few_files(pid: int, num: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_lack_of_descriptors_is_told_in_a_line_and_passes(made: Federation) -> None:
    raw_clients = at_work(made)
    go_on(made, raw_clients, 1)
    assert made.server is not None
    pid, out = made.server.pid, made.root / "server.out"
    before = out.stat().st_size
    with ExitStack() as stack:
        stack.enter_context(few_files(pid, max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 20))
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=20))
        until(lambda: "no connection can be taken" in out.read_text()[before:], 20, "a line on it")
        stack.enter_context(RawConnection(made.port, made.certs))  # a stranger more goes for each who comes
    go_on(made, raw_clients)
    text = out.read_text()[before:]
    assert "Traceback" not in text
    assert text.count("no connection can be taken") == 1
    assert len(text) < 10_000
