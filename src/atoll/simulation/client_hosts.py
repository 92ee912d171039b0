"""Simulation of the clients of a secure sum in several processes, which share the vectors by copy-on-write."""

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
from atoll.secagg.scheme import Ask, ClientHost, Message, Responder, in_this_process

WORTH_A_PROCESS = 20_000_000
"""Number of masked values from which on several processes are faster than one."""


def host_for(num_clients: int, length: int) -> ClientHost:
    """Return where to simulate a session: in this process if it is small, else in one process for each core."""
    num = worker_count(None)
    large = num_clients * num_clients * length >= WORTH_A_PROCESS
    return in_processes(num) if num > 1 and large and hasattr(os, "fork") else in_this_process


def in_processes(num_processes: int) -> ClientHost:
    """Simulate clients in forked processes; a client always stays in the same one."""

    @contextmanager
    def host(make: Callable[[], Responder]) -> Iterator[Ask]:
        context = get_context("fork")
        pipes: list[Connection] = []
        workers = []
        try:
            for _ in range(num_processes):
                own_end, child_end = context.Pipe()
                worker = context.Process(target=_serve, args=(child_end, [*pipes, own_end], make), daemon=True)
                worker.start()
                child_end.close()
                pipes.append(own_end)
                workers.append(worker)
            yield lambda messages: _ask(pipes, messages)
        finally:
            for pipe in pipes:
                pipe.close()
            for worker in workers:
                worker.join()

    return host


def _ask(pipes: list[Connection], messages: list[Message]) -> Iterator[bytes]:
    """Send each process the messages to its clients, and yield the answers as they arrive."""
    try:
        for number, pipe in enumerate(pipes):
            batch = [message for message in messages if message.client % len(pipes) == number]
            pipe.send_bytes(len(batch).to_bytes(4, "little"))
            for message in batch:
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
            "a process that simulated clients under secure aggregation died: if memory ran out, ask fewer clients; "
            "then continue with --resume"
        ) from error


def _serve(pipe: Connection, others: list[Connection], make: Callable[[], Responder]) -> None:
    """Answer messages in a forked process until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    respond = make()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            num = int.from_bytes(pipe.recv_bytes(), "little")
            frames = [pipe.recv_bytes() for _ in range(num)]
            messages = [Message(int.from_bytes(frame[:8], "little"), frame[8:]) for frame in frames]
            for answer in respond(messages):
                pipe.send_bytes(answer)
            pipe.send_bytes(b"")  # the end of the batch
    os._exit(0)
