"""Cell: one run of a grid, in its own directory, and how it is run in the process that is to do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atoll.api import Result, run
from atoll.core.coordinator import Reason
from atoll.core.errors import AtollError, PlanError
from atoll.core.events import Reader
from atoll.core.options import Count, read_value
from atoll.core.plan import Plan


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


def run_cell(cell: Cell, watch: Sequence[Reader] = ()) -> dict[str, Any] | None:
    """Run one cell in this process, or go on with it; return why it failed as plain data, None if it was stopped."""
    why, refused = "", False
    try:
        resume = (cell.path / "plan.toml").exists()
        result = run(cell.plan, out=cell.path, resume=resume, watch=watch, report=False)
        if result.reason == Reason.INTERRUPTED:
            return None
        if cell.finish is not None:
            cell.finish(result)
    except KeyboardInterrupt:
        return None
    except AtollError as error:
        why, refused = " ".join(str(error).split()), isinstance(error, PlanError)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
    return {"why": why, "refused": refused}
