"""Runs of a grid in processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from atoll.core.events import Event, RoundCommitted, RunStarted
from atoll.engine.processes import end_with_parent
from atoll.farm.cells import Cell, CellsWatcher, Failures, run_cell


def run_cells(cells: list[Cell], num_workers: int, watcher: CellsWatcher) -> Failures:
    """Run all cells, `num_workers` at a time; resume those that were stopped before.

    Ctrl-C stops all runs, each of which keeps its checkpoint, and KeyboardInterrupt is passed on to the caller.
    """
    waiting, failures = list(reversed(cells)), Failures()
    busy: dict[Connection, tuple[Cell, BaseProcess]] = {}
    watcher.begin(len(cells), sum(cell.plan.rounds for cell in cells))
    try:
        while waiting or busy:
            while waiting and len(busy) < num_workers:
                cell = waiting.pop()
                pipe, worker = _start(cell, list(busy))
                busy[pipe] = (cell, worker)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                cell, worker = busy[ready]
                message = _receive(ready, worker)
                if "rounds" in message:
                    watcher.rounds(message["rounds"])
                    continue
                del busy[ready]
                ready.close()
                worker.join()
                if message["why"]:
                    failures[cell.path] = (message["refused"], message["why"])
                watcher.cell(cell.plan.name, message["why"])
    finally:
        for _, worker in busy.values():
            worker.terminate()  # handled like Ctrl-C: the worker writes a checkpoint first
        for _, worker in busy.values():
            worker.join()
        watcher.end()
    return failures


def _start(cell: Cell, others: list[Connection]) -> tuple[Connection, BaseProcess]:
    """Start a worker for a cell, which closes the pipes of the `others` that it inherits."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(cell, sender, [*others, receiver]), daemon=True)
    worker.start()
    sender.close()
    return receiver, worker


def _receive(pipe: Connection, worker: BaseProcess) -> dict[str, Any]:
    """Return a worker's next message; a closed pipe means that the worker died."""
    try:
        message: dict[str, Any] = msgspec.json.decode(pipe.recv_bytes())
        return message
    except (EOFError, ConnectionResetError):
        worker.join()
        why = f"its process died (exit code {worker.exitcode}): if memory ran out, use fewer workers; then start again"
        return {"why": why, "refused": False}


class _RoundsReporter:
    """Watcher that reports finished rounds to the parent, including those from before a resume."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._done = pipe, 0

    def __call__(self, event: Event) -> None:
        """Report a round, unless it is the last one measured again."""
        if isinstance(event, RunStarted | RoundCommitted):
            done = event.version if isinstance(event, RunStarted) else int(event.row["round"])
            if done > self._done:
                self._pipe.send_bytes(msgspec.json.encode({"rounds": done - self._done}))
            self._done = done


def _work(cell: Cell, pipe: Connection, others: list[Connection]) -> None:
    """Run one cell in a worker process. Ctrl-C is handled by the parent, which then terminates the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_once)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    torch.set_num_threads(1)
    outcome = run_cell(cell, [_RoundsReporter(pipe)])
    if outcome is None:
        os._exit(0)  # the parent interrupted it and needs no message
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(msgspec.json.encode(outcome))
    os._exit(0)  # skip exit handlers, which belong to the parent


def _stop_once(number: int, frame: object) -> None:
    """Interrupt the run, and ignore further signals while it writes its checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
