"""Comparison of federated and split learning: every way and seed is an ordinary run, and the results are one table.

One plan and seed give the same partition, first model, cohorts and batches to all ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import PlanError
from atoll.core.options import read_value
from atoll.core.plan import Plan
from atoll.engine.base import Workers, worker_count
from atoll.farm import Cell, Failures, cell_directory, run_grid, seeds_of
from atoll.report.figures import write_whole
from atoll.report.main_figure import main_figure
from atoll.report.reading import RunRecord, read_run
from atoll.report.ways import FEDERATED, WAYS, Status, WayRun, WaysTable
from atoll.report.ways_page import ways_page
from atoll.simulation.dry_run import dry_run
from atoll.split.cost import client_load
from atoll.split.cut import Cut, cut_model, places
from atoll.train.build import build_job
from atoll.train.job import Job

BANDWIDTH, LATENCY = 1.25e6, 0.02
"""Bytes a second (10 Mbit/s) and seconds of a round trip, where neither the plan nor the caller says."""


def compare_ways(
    plan: Plan,
    *,
    out: str | Path,
    seeds: int | Sequence[int] = 1,
    bandwidth: float | None = None,
    latency: float | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> WaysTable:
    """Run a plan that has a cut as federated learning, split learning in turn, and both versions of SplitFed.

    `bandwidth` (bytes a second) and `latency` (seconds of a round trip) are those of each client's link, of the plan's
    `split` unless given. `seeds` is their number, from the plan's on, or a list. Each run lies in `out/cells`, and
    `workers` of them run at once. Call the function again to continue after a stop. A way that is refused or fails
    keeps its reason. At the end `out` holds compare.json and compare.html.
    """
    out, chosen_seeds = Path(out), seeds_of(plan, seeds)
    num_workers = worker_count(read_value(Workers | None, workers, "workers"))
    base = _with_links(plan, bandwidth, latency)
    job, cut = _cut(base)
    cells = {(way, seed): _cell(base, way, seed, out) for way in WAYS for seed in chosen_seeds}
    failures = run_grid(list(cells.values()), num_workers, progress=progress)
    table = _table(base, job, cut, cells, out, failures)
    write_whole(out / "compare.json", (json.dumps(table.to_dict(), indent=1) + "\n").encode())
    write_whole(out / "compare.html", ways_page(table, out, base.to_toml()).encode("utf-8", "replace"))
    return table


def _with_links(plan: Plan, bandwidth: float | None, latency: float | None) -> Plan:
    """Return a plan whose messages take time."""
    if plan.split is None:
        found = [place.name for place in places(build_job(plan))]
        raise PlanError(
            "split learning needs to know where the model is cut, and the plan has no split.cut: set it to one of "
            f"{', '.join(found)}, e.g. --set split.cut={json.dumps(found[0]) if found else ''}"
        )
    own = plan.split
    chosen = {
        "split.bandwidth": own.bandwidth if bandwidth is None else bandwidth,
        "split.latency": own.latency if latency is None else latency,
    }
    if all(value is None for value in chosen.values()):
        chosen = {"split.bandwidth": BANDWIDTH, "split.latency": LATENCY}
    return plan.replace({key: value for key, value in chosen.items() if value is not None})


def _cut(plan: Plan) -> tuple[Job, Cut]:
    """Build a plan once, so that an error of what all ways have in common is raised, and not noted for each."""
    checked = plan.replace({"split.way": "splitfed_v1", "split.handover": "server"})
    job, _ = dry_run(checked)
    assert plan.split is not None
    return job, cut_model(job, plan.split)


def _cell(plan: Plan, way: str, seed: int, out: Path) -> Cell:
    settings: dict[str, object] = {"seed": seed, "name": f"{way}, seed {seed}"}
    if plan.engine.name == "auto":
        settings["engine"] = "inline"  # so that the same clients are added up in the same order
    if way == FEDERATED:
        settings["split"] = None
    else:
        settings |= {"split.way": way, "engine": "inline"}
        settings |= {} if way == "in_turn" else {"split.handover": "server"}
    named = plan.replace(settings)
    return Cell(out / cell_directory(f"{way}_s{seed}", named), named)


def _table(
    plan: Plan, job: Job, cut: Cut, cells: Mapping[tuple[str, int], Cell], out: Path, failures: Failures
) -> WaysTable:
    assert plan.split is not None
    loads = {False: client_load(job, None, job.batch_size), True: client_load(job, cut, job.batch_size)}
    runs, metric = list[WayRun](), job.measures.main
    for (way, seed), cell in cells.items():
        directory = str(cell.path.relative_to(out))
        if cell.path in failures:
            refused, why = failures[cell.path]
            status: Status = "refused" if refused else "failed"
            runs.append(WayRun(way=way, seed=seed, status=status, why=why, directory=directory))
            continue
        record, load = read_run(cell.path), loads[way != FEDERATED]
        metric = main_figure([record])
        runs.append(WayRun(way=way, seed=seed, directory=directory, **_outcome(record, plan, metric), **load._asdict()))
    return WaysTable(
        title=plan.name or f"{plan.data.name}, {plan.model.name}",
        metric=metric,
        seeds=tuple(dict.fromkeys(seed for _, seed in cells)),
        bandwidth=plan.split.bandwidth,
        latency=plan.split.latency,
        cut=cut.describe(),
        runs=tuple(runs),
    )


def _outcome(record: RunRecord, plan: Plan, metric: str) -> dict[str, Any]:
    """Return what a run came to and what it cost."""
    last = record.rows[-1] if record.rows else {}
    figure = next((row["test"].get(metric) for row in reversed(record.rows) if "test" in row), None)
    reason = (record.result or {}).get("reason", "")
    outcome: dict[str, Any] = {
        "status": "failed" if reason in FAILURES else "done",
        "why": f"{reason}; {FAILURES[Reason(reason)]}" if reason in FAILURES else "",
        "figure": figure,
        "rounds": last.get("round", 0),
        "bytes_up": last.get("bytes_up", 0),
        "bytes_down": last.get("bytes_down", 0),
    }
    if record.plan.split is not None:
        counted = {key: last.get(key, 0) for key in ("messages", "round_trips", "simulated_seconds")}
        return {**outcome, **counted}
    return {**outcome, **_federated(record.rows, plan)}


def _federated(rows: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    """Return messages and time of rounds in which each client gets a broadcast and sends an update, all at once."""
    split = plan.split
    assert split is not None
    clients = sum(row["clients"] for row in rows)
    ends = [0, *(row["bytes_up"] + row["bytes_down"] for row in rows)]
    sent = [after - before for before, after in pairwise(ends)]
    each = [num / max(1, row["clients"]) for num, row in zip(sent, rows, strict=True)]
    seconds = sum(num / split.bandwidth for num in each) if split.bandwidth else 0.0
    return {
        "messages": 2 * clients,
        "round_trips": len(rows),
        "simulated_seconds": seconds + len(rows) * (split.latency or 0.0),
    }
