"""Parallel execution of several runs, each in its own process and run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.commit.coordinator import build_coordinator
from atoll.core.options import read_value
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.engine.base import Workers, worker_count
from atoll.engine.build import build_engine
from atoll.farm.cells import Cell, CellsWatcher, Failures, cell_directory, plan_key, run_cell, seeds_of
from atoll.farm.local import run_cells
from atoll.report.figures import write_whole
from atoll.report.progress import CellsBar
from atoll.train.build import build_job
from atoll.train.federation import build_federation

__all__ = [
    "Cell",
    "CellsWatcher",
    "Failures",
    "Pool",
    "cell_directory",
    "plan_key",
    "run_cell",
    "run_cells",
    "run_grid",
    "seeds_of",
    "with_engine",
]

WHERE = ("workers", "spawn", "address", "gpus_per_worker", "working_dir", "patience")
"""Options of engines of many processes that say where and how many, which an engine of one process has not."""


class Pool(NamedTuple):
    """Where the runs of a grid go."""

    num_workers: int | None
    """How many run at once; None on a cluster: as many as there is room for."""
    ray: str | None = None
    """The address of a Ray cluster; None for processes of this machine."""

    @classmethod
    def of(cls, plan: Plan, workers: int | None, ray: str | None) -> Pool:
        """Return the pool of a grid of plans like this one: a cluster if it is named, here or by the plan's engine."""
        num: int | None = read_value(Workers | None, workers, "workers")
        if ray is None and plan.engine.name == "ray":
            ray = str(plan.engine.options.get("address", "auto"))
        return cls(worker_count(num) if ray is None else num, ray)


def run_grid(cells: Sequence[Cell], pool: Pool | int, *, progress: bool = False) -> Failures:
    """Run the cells that are not done, in a pool or so many at a time; resume those that were stopped before.

    A cell that is refused or fails leaves the others alone. Cells that share a directory are one run.
    """
    missing = {cell.path: cell for cell in cells if not cell.is_done}
    pool, watcher = Pool(pool) if isinstance(pool, int) else pool, CellsBar(progress)
    if pool.ray is None:
        assert pool.num_workers is not None
        return run_cells(list(missing.values()), pool.num_workers, watcher)
    from atoll.farm.ray import run_cells_on_ray

    return run_cells_on_ray(list(missing.values()), pool.ray, pool.num_workers, watcher)


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
    if name in ("processes", "ray"):
        kept_options = {key: value for key, value in options.items() if key not in WHERE}
        return plan.replace({"engine": {"name": "vectorised", **kept_options}})
    if name != "auto":
        return plan
    key = plan_key(plan)
    measured = json.loads(file.read_text()) if file.exists() else {}
    if measured.get("plan") != key:
        places = {key: options[key] for key in ("device", "precision", "tf32") if key in options}
        engine = build_engine(Part("auto", workers=1, **places), job, build_coordinator(checked, federation))
        measured = {"plan": key, "engine": engine.describe()}
        engine.close()
        write_whole(file, (json.dumps(measured, indent=1) + "\n").encode())
    return plan.replace({"engine": measured["engine"]})
