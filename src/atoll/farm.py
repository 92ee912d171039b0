"""Parallel execution of several runs, each in its own process and run directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from atoll.api import Result, run
from atoll.commit.coordinator import build_coordinator
from atoll.core.coordinator import Reason
from atoll.core.errors import AtollError, PlanError
from atoll.core.events import Event, RoundCommitted, RunStarted
from atoll.core.options import Count, read_value
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.engine.build import build_engine
from atoll.engine.processes import end_with_parent
from atoll.report.figures import write_whole
from atoll.report.progress import CellsBar
from atoll.train.build import build_job
from atoll.train.federation import build_federation


class Cell(NamedTuple):
    """A plan and its run directory."""

    path: Path
    plan: Plan
    finish: Callable[[Result], None] | None = None
    """Called in the run's process with its result, unless it was interrupted."""
    writes: str = ""
    """The file that `finish` writes to the run directory: a cell is not done without it."""

    @property
    def is_done(self) -> bool:
        """Whether the run has ended without being interrupted, and `finish` has written its file."""
        try:
            reason = json.loads((self.path / "result.json").read_text())["reason"]
        except (OSError, ValueError, KeyError):
            return False
        return bool(reason != Reason.INTERRUPTED) and (self.path / self.writes).exists()


class CellsWatcher(Protocol):
    """Receiver of the progress of many runs."""

    def begin(self, num_cells: int, num_rounds: int) -> None:
        """Note the number of runs, and of their rounds in all."""

    def rounds(self, num_rounds: int) -> None:
        """Note that further rounds are done, in any of the runs."""

    def cell(self, name: str, why: str) -> None:
        """Note that a run has ended; `why` is its error, or ""."""

    def end(self) -> None:
        """Note that all runs have ended or were stopped."""


Failures = dict[Path, tuple[bool, str]]
"""Directory of a failed run -> whether the plan was refused, and the error."""


def run_grid(cells: Sequence[Cell], num_workers: int, *, progress: bool = False) -> Failures:
    """Run the cells that are not done, `num_workers` at a time; resume those that were stopped before.

    A cell that is refused or fails leaves the others alone. Cells that share a directory are one run.
    """
    missing = {cell.path: cell for cell in cells if not cell.is_done}
    return run_cells(list(missing.values()), num_workers, CellsBar(progress))


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


def plan_key(plan: Plan) -> str:
    """Return a hash of all settings that affect the result of a run, which engine and name do not."""
    settings = {key: value for key, value in plan.to_dict().items() if key not in ("engine", "name")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def cell_directory(words: str, plan: Plan) -> str:
    """Return the directory of a cell, relative to that of the grid: readable words, and a hash of its plan."""
    slug = "".join(c if c.isalnum() or c in "._" else "-" for c in words)
    return f"cells/{slug[:80]}_{plan_key(plan)}"


def seeds_of(plan: Plan, seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a grid: so many from the plan's on, or those that are named."""
    if isinstance(seeds, int):
        num: int = read_value(Count, seeds, "seeds")
        return list(range(plan.seed, plan.seed + num))
    if not seeds or len(set(seeds)) < len(seeds):
        raise PlanError(f"seeds must name at least one seed, and each once, got {list(seeds)}: leave some out")
    return list(seeds)


def with_engine(plan: Plan, checked: Plan, file: Path) -> Plan:
    """Return a plan with an engine of one process, for cells that run beside each other.

    `checked` is built in its place, so that an error of the common settings is raised once, not for every cell. The
    choice of `auto` is measured once and kept in `file`, so that all cells use the same engine, also later.
    """
    federation = build_federation(checked)
    job = build_job(checked, federation)
    name, options = plan.engine.name, plan.engine.options
    if plan.split is not None:
        return plan.replace({"engine": "inline"})
    if name == "processes":
        kept_options = {key: value for key, value in options.items() if key != "workers"}
        return plan.replace({"engine": {"name": "vectorised", **kept_options}})
    if name != "auto":
        return plan
    key = plan_key(plan)
    measured = json.loads(file.read_text()) if file.exists() else {}
    if measured.get("plan") != key:
        engine = build_engine(Part("auto", workers=1), job, build_coordinator(checked, federation))
        measured = {"plan": key, "engine": engine.describe()}
        engine.close()
        write_whole(file, (json.dumps(measured, indent=1) + "\n").encode())
    return plan.replace({"engine": measured["engine"]})


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
    why, refused = "", False
    try:
        resume = (cell.path / "plan.toml").exists()
        result = run(cell.plan, out=cell.path, resume=resume, watch=[_RoundsReporter(pipe)], report=False)
        if result.reason == Reason.INTERRUPTED:
            os._exit(0)  # the parent interrupted it and needs no message
        if cell.finish is not None:
            cell.finish(result)
    except KeyboardInterrupt:
        os._exit(0)
    except AtollError as error:
        why, refused = " ".join(str(error).split()), isinstance(error, PlanError)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(msgspec.json.encode({"why": why, "refused": refused}))
    os._exit(0)  # skip exit handlers, which belong to the parent


def _stop_once(number: int, frame: object) -> None:
    """Interrupt the run, and ignore further signals while it writes its checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
