"""Several runs at once, each in a process of its own and in a run directory of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from atoll.api import run
from atoll.core.coordinator import Reason
from atoll.core.errors import AtollError, PlanError
from atoll.core.events import Event, RoundCommitted, RunStarted
from atoll.core.plan import Plan
from atoll.engine.processes import end_with_parent


class Cell(NamedTuple):
    """A plan and where it is run."""

    path: Path
    plan: Plan


class CellsWatcher(Protocol):
    """Somebody who looks on while many runs go on."""

    def begin(self, num_cells: int, num_rounds: int) -> None:
        """So many runs with so many rounds in all are ahead."""

    def rounds(self, num_rounds: int) -> None:
        """So many rounds more are done, in any of the runs."""

    def cell(self, name: str, why: str) -> None:
        """A run is over; `why` says what went wrong, if anything."""

    def end(self) -> None:
        """All are over, or were stopped."""


Failures = dict[Path, tuple[bool, str]]
"""The runs that came to nothing: whether the plan was refused, and why."""


def run_cells(cells: list[Cell], num_workers: int, watcher: CellsWatcher) -> Failures:
    """Run all cells, `num_workers` at a time; one that was stopped before goes on where it was.

    Ctrl-C stops all runs, each keeps what it has, and KeyboardInterrupt goes on to the caller.
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
                said = _heard(ready, worker)
                if "rounds" in said:
                    watcher.rounds(said["rounds"])
                    continue
                del busy[ready]
                ready.close()
                worker.join()
                if said["why"]:
                    failures[cell.path] = (said["refused"], said["why"])
                watcher.cell(cell.plan.name, said["why"])
    finally:
        for _, worker in busy.values():
            worker.terminate()  # like Ctrl-C: it writes a checkpoint first
        for _, worker in busy.values():
            worker.join()
        watcher.end()
    return failures


def _start(cell: Cell, others: list[Connection]) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(cell, there, [*others, here]), daemon=True)
    worker.start()
    there.close()
    return here, worker


def _heard(pipe: Connection, worker: BaseProcess) -> dict[str, Any]:
    """What a worker says; its silence means that it died."""
    try:
        said: dict[str, Any] = msgspec.json.decode(pipe.recv_bytes())
        return said
    except (EOFError, ConnectionResetError):
        worker.join()
        why = f"its process died (exit code {worker.exitcode}): if memory ran out, use fewer workers; then start again"
        return {"why": why, "refused": False}


class _Teller:
    """Tells the parent of rounds as they are done; rounds from before count too."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._done = pipe, 0

    def __call__(self, event: Event) -> None:
        """Tell of a round, unless it is the last one measured again."""
        if isinstance(event, RunStarted | RoundCommitted):
            done = event.version if isinstance(event, RunStarted) else int(event.row["round"])
            if done > self._done:
                self._pipe.send_bytes(msgspec.json.encode({"rounds": done - self._done}))
            self._done = done


def _work(cell: Cell, pipe: Connection, others: list[Connection]) -> None:
    """A worker's life: one run. Ctrl-C is the parent's business, which then ends the workers one by one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_once)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    torch.set_num_threads(1)
    why, refused = "", False
    try:
        resume = (cell.path / "plan.toml").exists()
        result = run(cell.plan, out=cell.path, resume=resume, watch=[_Teller(pipe)], report=False)
        if result.reason == Reason.INTERRUPTED:
            os._exit(0)  # the parent knows
    except KeyboardInterrupt:
        os._exit(0)
    except AtollError as error:
        why, refused = " ".join(str(error).split()), isinstance(error, PlanError)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(msgspec.json.encode({"why": why, "refused": refused}))
    os._exit(0)  # nothing that was forked with it is ended twice


def _stop_once(number: int, frame: object) -> None:
    """Be interrupted, but not again while what there is gets written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
