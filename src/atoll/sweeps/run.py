"""Sweep: a plan with many settings and seeds, each an ordinary run; the results are one table and one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.farm import Cell, Failures, Pool, cell_directory, run_grid, seeds_of
from atoll.report.figures import write_whole
from atoll.report.sweep import SAMPLES, SweepRun, SweepTable, as_csv, label, value_text
from atoll.report.sweep_page import sweep_page
from atoll.sweeps.grid import (
    Checker,
    Combination,
    Engines,
    Grid,
    check_combinations,
    check_grid,
    combinations,
)
from atoll.sweeps.measure import FILE, chosen_on, measure, read_measured


def sweep(
    plan: Plan,
    *,
    out: str | Path,
    grid: Grid | None = None,
    search: Mapping[str, str] | None = None,
    trials: int | None = None,
    seeds: int | Sequence[int] = 3,
    workers: int | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> SweepTable:
    """Run a plan with every combination of settings and every seed, and choose the best.

    `grid` maps keys of the plan to lists of values: {"local.lr": [0.01, 0.1]}. Instead, `search` maps keys to ranges
    ("log:0.001:1", "float:0:1", "int:1:20", "choice:a,b"), of which Optuna tries `trials` points. `seeds` is their
    number, from the plan's on, or a list. Each run lies in `out/cells`, and `workers` of them run at once: in
    processes of this machine, or on the Ray cluster at the address `ray`, whose machines must all see `out`. Call the
    function again to continue after a stop, or with more values: runs that have ended are not run again. A run that is
    refused or fails keeps its reason, and the others continue. The best is chosen by the main figure: on clients'
    validation samples if the plan has `evaluation.validation`, else on those of `evaluation.holdout`, else on the test
    set. At the end `out` holds sweep.json, sweep.csv, sweep.html and best.toml.
    """
    runner = SweepRunner(plan, Path(out), seeds, Pool.of(plan, workers, ray), progress=progress)
    if search is not None:
        if grid is not None:
            raise PlanError('a sweep has a grid or a search, not both: write the grid\'s values as "choice:a,b"')
        from atoll.sweeps.search import run_search

        return run_search(runner, search, trials)
    if trials is not None:
        raise PlanError(f"trials is {trials}, but there is no search: a grid tries all of its values; leave trials out")
    check_grid(grid or {})
    found = list(map(runner.checker, combinations(plan, grid or {})))
    metric = check_combinations(found)
    return runner.finish(found, metric, runner.run(found))


class SweepRunner:
    """Runs combinations with all seeds, and makes the table of them."""

    def __init__(self, plan: Plan, out: Path, seeds: int | Sequence[int], pool: Pool, *, progress: bool) -> None:
        self.plan, self.out, self.seeds = plan, out, seeds_of(plan, seeds)
        self._pool = pool
        self._progress, self._engines = progress, Engines(out / "engines")
        self.checker = Checker(self.seeds[0], self._known)

    def run(self, found: Sequence[Combination]) -> Failures:
        """Run the combinations that are not done; return the runs that failed."""
        cells = []
        for each in found:
            own = [] if each.plan is None else [self._cell(each, each.plan, seed) for seed in self.seeds]
            if own and not all(cell.is_done for cell in own):
                engine = self._engines(own[0].plan).engine.to_dict()
                own = [cell._replace(plan=cell.plan.replace({"engine": engine})) for cell in own]
            cells += own
        return run_grid(cells, self._pool, progress=self._progress)

    def finish(
        self, found: Sequence[Combination], metric: tuple[str, bool], failures: Failures, *, is_search: bool = False
    ) -> SweepTable:
        """Gather the results of all combinations and write table, page and best plan."""
        table = self.table(found, metric, failures, is_search=is_search)
        self._write(table, found)
        return table

    def table(
        self, found: Sequence[Combination], metric: tuple[str, bool], failures: Failures, *, is_search: bool = False
    ) -> SweepTable:
        """Gather the results of all combinations."""
        plan = self.plan
        runs = [self._run(place, each, seed, failures) for place, each in enumerate(found) for seed in self.seeds]
        plans = [each.plan for each in found if each.plan is not None]
        protected = {
            "privacy": any(each.privacy for each in plans),
            "secure aggregation": any(each.secagg for each in plans),
        }
        return SweepTable(
            title=plan.name or f"{plan.data.name}, {plan.algorithm.name}",
            metric=metric[0],
            larger_is_better=metric[1],
            chosen_on=chosen_on(plan),
            keys=tuple(dict.fromkeys(key for each in found for key in each.settings)),
            combinations=tuple(each.settings for each in found),
            seeds=tuple(self.seeds),
            runs=tuple(runs),
            protection=" and ".join(word for word, is_so in protected.items() if is_so),
            is_search=is_search,
        )

    def _cell(self, combination: Combination, plan: Plan, seed: int) -> Cell:
        named = plan.replace({"seed": seed, "name": f"{label(combination.settings)}, seed {seed}"})
        words = "_".join(f"{key.rpartition('.')[2]}-{value_text(v)}" for key, v in combination.settings.items())
        return Cell(self.out / cell_directory(f"{words}_s{seed}", named), named, measure, FILE)

    def _known(self, combination: Combination) -> tuple[str, bool] | None:
        """Return the main figure of a combination if all of its runs have ended."""
        assert combination.plan is not None
        cells = [self._cell(combination, combination.plan, seed) for seed in self.seeds]
        if not all(cell.is_done for cell in cells):
            return None
        measured = read_measured(cells[0].path)
        return measured.metric, measured.larger_is_better

    def _run(self, place: int, combination: Combination, seed: int, failures: Failures) -> SweepRun:
        """Return the outcome of one run, from its directory or its failure."""
        run = SweepRun(combination=place, seed=seed, status="failed")
        if combination.plan is None:
            return replace(run, status="refused", why=combination.why)
        path = self._cell(combination, combination.plan, seed).path
        run = replace(run, directory=str(path.relative_to(self.out)))
        if path in failures:
            refused, why = failures[path]
            return replace(run, status="refused" if refused else "failed", why=why)
        measured = read_measured(path)
        costs = {name: getattr(measured, name) for name in ("test", "rounds", "bytes_up", "seconds")}
        if measured.reason in FAILURES:
            return replace(run, why=f"{measured.reason}; {FAILURES[Reason(measured.reason)]}", **costs)
        if measured.figure is None:
            samples = SAMPLES[chosen_on(combination.plan)]
            why = f"{measured.metric} on {samples} is not finite or was not measured: see the run's metrics.jsonl"
            return replace(run, why=why, **costs)
        return replace(run, status="done", figure=measured.figure, **costs)

    def _write(self, table: SweepTable, found: Sequence[Combination]) -> None:
        out, best = self.out, table.best
        write_whole(out / "sweep.json", (json.dumps(table.to_dict(), indent=1) + "\n").encode())
        write_whole(out / "sweep.csv", as_csv(table).encode("utf-8", "replace"))
        write_whole(out / "sweep.html", sweep_page(table, out, self.plan.to_toml()).encode("utf-8", "replace"))
        if best is None:
            (out / "best.toml").unlink(missing_ok=True)
            return
        plan = found[best.combination].plan
        assert plan is not None
        seeds = ", ".join(map(str, table.seeds))
        head = (
            f"# The best of {len(found)} combinations by {table.metric} on {SAMPLES[table.chosen_on]}; seeds {seeds}.\n"
        )
        write_whole(out / "best.toml", (head + plan.to_toml()).encode())
