"""Runs of a grid on a Ray cluster, whose machines all see the directory of the grid."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.core.errors import PlanError, RunError
from atoll.core.parts import imported
from atoll.core.plan import Plan
from atoll.engine.base import worker_count
from atoll.engine.ray_cluster import LOCAL, Cluster, connect, in_short, restored_signals, why_lost
from atoll.engine.rebuild import go_to, must_be_named, surroundings
from atoll.farm.cells import Cell, CellsWatcher, Failures, run_cell

MAX_TRIES = 3
"""A run whose worker was lost so often is given up; it goes on from its checkpoint in between."""
PATIENCE = 60.0
"""Seconds until a cluster without room for a single run is a refusal."""
BEAT = 1.0
"""Seconds between two looks at the cluster and at the rounds that are done."""
STOP_SECONDS = 60.0
"""So long runs that are stopped have to write their checkpoints."""
WORKER_CALLS = 50
"""So many runs are done by one process of a worker, which has imported everything once."""


def run_cells_on_ray(cells: list[Cell], address: str, num_workers: int | None, watcher: CellsWatcher) -> Failures:
    """Run all cells as tasks of a cluster, one CPU each; resume those that were stopped or whose machine was lost.

    Ctrl-C stops all runs, each of which keeps its checkpoint, and KeyboardInterrupt is passed on to the caller.
    """
    if not cells:
        return {}
    for cell in cells:
        must_be_named(cell.plan)
    cpus = worker_count(num_workers) if address == LOCAL else None
    cluster = connect(address, what="a grid of runs on a cluster", cpus=cpus)
    folder = Path(os.path.commonpath([cell.path.absolute().parent for cell in cells]))
    mark = folder / f".{secrets.token_hex(8)}"
    grid = _RayGrid(cluster, cells, num_workers, watcher, mark)
    watcher.begin(len(cells), sum(cell.plan.rounds for cell in cells))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text("written by the process that began these runs, and read by its workers\n")
        return grid.run()
    finally:
        with restored_signals():
            grid.stop()
        mark.unlink(missing_ok=True)
        cluster.close()
        watcher.end()


class _RayGrid:
    """The runs that wait, those that are at work, and what became of the others."""

    def __init__(
        self, cluster: Cluster, cells: Sequence[Cell], num_workers: int | None, watcher: CellsWatcher, mark: Path
    ) -> None:
        self._cluster, self._ray, self._lost = cluster, cluster.ray, why_lost(cluster.ray)
        self._num_workers, self._watcher = num_workers, watcher
        self._waiting, self._busy = list(reversed(cells)), dict[Any, Cell]()
        self._tries, self._rounds = dict[Path, int](), dict[Path, int]()
        self._failures = Failures()
        self._mark, self._around = str(mark), surroundings()
        self._task = self._ray.remote(num_cpus=1, max_retries=0, max_calls=WORKER_CALLS, scheduling_strategy="SPREAD")(
            work_on_ray
        )
        self._freed, self._looked_at = 0, 0.0

    def run(self) -> Failures:
        """Run everything."""
        began = time.monotonic()
        while self._waiting or self._busy:
            self._begin()
            if self._busy:
                ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=BEAT)
                for call in ready:
                    self._end(call, self._busy.pop(call))
            elif time.monotonic() - began > PATIENCE:
                raise RunError(
                    f"no run found room on Ray within {PATIENCE:g} seconds; each needs a CPU of its own, and the "
                    f"cluster has {self._cluster.in_words()}: add machines, or wait until others have ended"
                )
            else:
                time.sleep(BEAT)
            for cell in self._busy.values():
                self._count(cell)
        return self._failures

    def stop(self) -> None:
        """Stop what is at work, as Ctrl-C does, and wait until it has written its checkpoint."""
        for call in self._busy:
            with contextlib.suppress(Exception):  # a cluster that is gone has nothing to stop
                self._ray.cancel(call)
        with contextlib.suppress(Exception):
            self._ray.wait(list(self._busy), num_returns=len(self._busy), timeout=STOP_SECONDS)

    def _begin(self) -> None:
        """Begin as many runs as there is room for, as machines join and others end."""
        now, room = time.monotonic(), self._freed
        if now - self._looked_at > BEAT:
            self._looked_at, room = now, max(room, self._cluster.slots())
        if self._num_workers is not None:
            room = min(room, self._num_workers - len(self._busy))
        self._freed = 0
        for _ in range(min(room, len(self._waiting))):
            cell = self._waiting.pop()
            self._busy[self._task.remote(_packed(cell, self._mark, self._around))] = cell

    def _end(self, call: Any, cell: Cell) -> None:
        """Note how a run has ended; one whose worker was lost goes on elsewhere."""
        self._freed += 1
        try:
            outcome: dict[str, Any] = msgspec.json.decode(self._ray.get(call))
        except self._lost as error:
            self._tries[cell.path] = self._tries.get(cell.path, 0) + 1
            if self._tries[cell.path] < MAX_TRIES:
                self._waiting.append(cell)
                return
            why = " ".join(
                f"{MAX_TRIES} workers were lost: {in_short(error)}; if memory ran out, use fewer workers".split()
            )
            outcome = {"why": why, "refused": False}
        if "unseen" in outcome:
            raise RunError(
                f"a worker on Ray ({outcome['unseen']}) does not see {cell.path.absolute().parent}: name a directory "
                "by --out that all machines of the cluster share"
            )
        self._count(cell)
        if outcome["why"]:
            self._failures[cell.path] = (outcome["refused"], outcome["why"])
        self._watcher.cell(cell.plan.name, outcome["why"])

    def _count(self, cell: Cell) -> None:
        """Tell how many rounds of a run are done, by the rows that it has written."""
        with contextlib.suppress(OSError):
            done = (cell.path / "metrics.jsonl").read_bytes().count(b"\n")
            before = self._rounds.get(cell.path, 0)
            if done > before:
                self._watcher.rounds(done - before)
                self._rounds[cell.path] = done


def work_on_ray(request: bytes) -> bytes:
    """Run one cell in a worker on Ray; the answer says why it failed, if it did."""
    header = msgspec.json.decode(request)
    if not os.path.exists(header["mark"]):
        return msgspec.json.encode({"unseen": os.uname().nodename})
    where = go_to(header["around"])
    torch.set_num_threads(1)
    try:
        finish = _finish_of(header["finish"])
        cell = Cell(Path(header["path"]), Plan.from_toml(header["plan"]), finish, header["writes"])
        outcome = run_cell(cell)
    except PlanError as error:
        outcome = {"why": f"a worker ({where}): {error}", "refused": True}
    return msgspec.json.encode(outcome or {"why": "it was stopped", "refused": False})


def _packed(cell: Cell, mark: str, around: Mapping[str, Any]) -> bytes:
    """Return a cell as bytes; what is done at its end is named by its module."""
    finish = cell.finish
    keywords = dict(finish.keywords) if isinstance(finish, partial) else {}
    function: Any = finish.func if isinstance(finish, partial) else finish
    name = None if function is None else f"{function.__module__}:{function.__qualname__}"
    header = {
        "path": str(cell.path.absolute()),
        "plan": cell.plan.to_toml(),
        "finish": None if name is None else [name, keywords],
        "writes": cell.writes,
        "mark": mark,
        "around": around,
    }
    return msgspec.json.encode(header)


def _finish_of(named: list[Any] | None) -> Callable[..., None] | None:
    return None if named is None else partial(imported(named[0]), **named[1])
