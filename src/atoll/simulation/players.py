"""Clients of a secure sum played by several processes, which share the vectors by copy-on-write."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from atoll.core.errors import RunError
from atoll.engine.base import worker_count
from atoll.engine.processes import end_with_parent
from atoll.secagg.scheme import Ask, Message, Player, Stage, here

WORTH_A_PROCESS = 20_000_000
"""Masked values from which on more than one process is worth it."""


def stage_for(num_clients: int, length: int) -> Stage:
    """Where to play a session: here if it is small, else in a process for each core."""
    num = worker_count(None)
    large = num_clients * num_clients * length >= WORTH_A_PROCESS
    return several(num) if num > 1 and large and hasattr(os, "fork") else here


def several(num_players: int) -> Stage:
    """A stage of forked processes; a client is always played by the same one."""

    @contextmanager
    def stage(make: Callable[[], Player]) -> Iterator[Ask]:
        context = get_context("fork")
        pipes: list[Connection] = []
        workers = []
        try:
            for _ in range(num_players):
                mine, theirs = context.Pipe()
                worker = context.Process(target=_serve, args=(theirs, [*pipes, mine], make), daemon=True)
                worker.start()
                theirs.close()
                pipes.append(mine)
                workers.append(worker)
            yield lambda messages: _ask(pipes, messages)
        finally:
            for pipe in pipes:
                pipe.close()
            for worker in workers:
                worker.join()

    return stage


def _ask(pipes: list[Connection], messages: list[Message]) -> Iterator[bytes]:
    """Tell each process what concerns its clients, and give the answers as they come."""
    try:
        for pipe in pipes:
            mine = [m for m in messages if m.client % len(pipes) == pipes.index(pipe)]
            pipe.send_bytes(len(mine).to_bytes(4, "little"))
            for message in mine:
                pipe.send_bytes(message.client.to_bytes(8, "little") + message.data)
        busy = set(pipes)
        while busy:
            for ready in wait(list(busy)):
                pipe = ready  # type: ignore[assignment]
                answer = pipe.recv_bytes()
                if answer:
                    yield answer
                else:
                    busy.discard(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RunError(
            "a process that played clients under secure aggregation died: if memory ran out, ask fewer clients; "
            "then continue with --resume"
        ) from error


def _serve(pipe: Connection, others: list[Connection], make: Callable[[], Player]) -> None:
    """Play until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    play = make()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            num = int.from_bytes(pipe.recv_bytes(), "little")
            raw = [pipe.recv_bytes() for _ in range(num)]
            for answer in play([Message(int.from_bytes(each[:8], "little"), each[8:]) for each in raw]):
                pipe.send_bytes(answer)
            pipe.send_bytes(b"")
    os._exit(0)
