"""Comparison of federated and split learning: every way and seed is an ordinary run, and the results are one table.

One plan and seed give the same partition, first model, cohorts and batches to all ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import AtollError, PlanError
from atoll.core.options import read_value
from atoll.core.plan import Plan
from atoll.core.split import VERTICAL, Split
from atoll.engine.base import Workers, worker_count
from atoll.farm import Cell, Failures, cell_directory, run_grid, seeds_of
from atoll.report.figures import write_whole
from atoll.report.main_figure import main_figure
from atoll.report.reading import RunRecord, read_run
from atoll.report.ways import ALONE, CENTRAL, COLUMN_WAYS, FEDERATED, WAYS, Status, WayRun, WaysTable
from atoll.report.ways_page import ways_page
from atoll.simulation.dry_run import dry_run
from atoll.simulation.exposure import cut_exposure, model_vector
from atoll.split.columns import build_vertical
from atoll.split.cost import Load, client_load, party_load
from atoll.split.cut import cut_model, places
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

    A plan of parties that hold columns runs with all columns in one place, as it is, and with those of the party that
    holds the labels.

    `bandwidth` (bytes a second) and `latency` (seconds of a round trip) are those of each client's link, of the plan's
    `split` unless given. `seeds` is their number, from the plan's on, or a list. Each run lies in `out/cells`, and
    `workers` of them run at once. Call the function again to continue after a stop. A way that is refused or fails
    keeps its reason. At the end `out` holds compare.json and compare.html.
    """
    out, chosen_seeds = Path(out), seeds_of(plan, seeds)
    num_workers = worker_count(read_value(Workers | None, workers, "workers"))
    base = _with_links(plan, bandwidth, latency)
    vertical = _split(base).way == VERTICAL
    job, described, loads = _of_parties(base) if vertical else _of_layers(base)
    ways, cell = (COLUMN_WAYS, _column_cell) if vertical else (WAYS, _cell)
    cells = {(way, seed): cell(base, way, seed, out) for way in ways for seed in chosen_seeds}
    failures = run_grid(list(cells.values()), num_workers, progress=progress)
    table = _table(base, job.measures.main, described, loads, cells, out, failures)
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


def _split(plan: Plan) -> Split:
    assert plan.split is not None
    return plan.split


def _of_layers(plan: Plan) -> tuple[Job, dict[str, Any], dict[str, Load]]:
    """Build a plan once, so that an error of what all ways have in common is raised, and not noted for each.

    Return also what the cut is, and what a client of each way computes and keeps.
    """
    checked = plan.replace({"split.way": "splitfed_v1", "split.handover": "server"})
    job, _ = dry_run(checked)
    cut = cut_model(job, _split(plan))
    loads = {way: client_load(job, None if way == FEDERATED else cut, job.batch_size) for way in WAYS}
    return job, cut.describe(), loads


def _of_parties(plan: Plan) -> tuple[Job, dict[str, Any], dict[str, Load]]:
    """Build a plan of parties once; the loads are those of whole models at home, and of the largest party."""
    job, _ = dry_run(plan)
    parties = build_vertical(plan, job)
    jobs = {way: build_job(_at_home(plan, way)) for way in (CENTRAL, ALONE)}
    loads = {way: client_load(each, None, each.batch_size) for way, each in jobs.items()}
    sides = [party_load(job, holder, job.batch_size) for holder in parties.holders]
    return job, parties.describe(), {**loads, VERTICAL: max(sides, key=lambda load: load.multiply_adds)}


def _at_home(plan: Plan, way: str) -> Plan:
    """Return the plan of one party: with the columns of all, or with its own; nothing of it travels."""
    split = _split(plan)
    parties = split.parties or ()
    own = parties[split.label_holder]
    settings: dict[str, object] = dict.fromkeys(("labels", "codecs", "tail", "bandwidth", "latency"))
    if way == CENTRAL:
        columns = [column for party in parties for column in party.columns]
        width = sum(party.width for party in parties)
        settings |= {"missing": None, "parties": [{**own.to_dict(), "columns": columns, "width": width}]}
    else:
        settings |= {"parties": [own.to_dict()]}
    return plan.replace({"policy": None, **{f"split.{key}": value for key, value in settings.items()}})


def _column_cell(plan: Plan, way: str, seed: int, out: Path) -> Cell:
    named = (plan if way == VERTICAL else _at_home(plan, way)).replace(
        {"seed": seed, "name": f"{way}, seed {seed}", "engine": "inline"}
    )
    return Cell(out / cell_directory(f"{way}_s{seed}", named), named)


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
    plan: Plan,
    metric: str,
    cut: dict[str, Any],
    loads: Mapping[str, Load],
    cells: Mapping[tuple[str, int], Cell],
    out: Path,
    failures: Failures,
) -> WaysTable:
    runs = list[WayRun]()
    for (way, seed), cell in cells.items():
        directory = str(cell.path.relative_to(out))
        if cell.path in failures:
            refused, why = failures[cell.path]
            status: Status = "refused" if refused else "failed"
            runs.append(WayRun(way=way, seed=seed, status=status, why=why, directory=directory))
            continue
        record, load = read_run(cell.path), loads[way]
        metric = main_figure([record])
        outcome = {**_outcome(record, plan, metric, way), **load._asdict(), **_exposure(record)}
        runs.append(WayRun(way=way, seed=seed, directory=directory, **outcome))
    return WaysTable(
        title=plan.name or f"{plan.data.name}, {plan.model.name}",
        metric=metric,
        seeds=tuple(dict.fromkeys(seed for _, seed in cells)),
        bandwidth=_split(plan).bandwidth,
        latency=_split(plan).latency,
        cut=cut,
        runs=tuple(runs),
    )


def _outcome(record: RunRecord, plan: Plan, metric: str, way: str) -> dict[str, Any]:
    """Return what a run came to and what it cost."""
    last = record.rows[-1] if record.rows else {}
    figure = next((row["test"].get(metric) for row in reversed(record.rows) if "test" in row), None)
    reason = (record.result or {}).get("reason", "")
    outcome: dict[str, Any] = {
        "status": "failed" if reason in FAILURES else "done",
        "why": f"{reason}; {FAILURES[Reason(reason)]}" if reason in FAILURES else "",
        "figure": figure,
        "rounds": last.get("round", 0),
    }
    if way in (CENTRAL, ALONE):
        return outcome  # at home
    outcome |= {"bytes_up": last.get("bytes_up", 0), "bytes_down": last.get("bytes_down", 0)}
    if record.plan.split is not None:
        counted = {key: last.get(key, 0) for key in ("messages", "round_trips", "simulated_seconds")}
        return {**outcome, **counted}
    return {**outcome, **_federated(record.rows, plan)}


def _exposure(record: RunRecord) -> dict[str, float | None]:
    """Return what the final model's activations say of samples; nothing without a cut, or without numbers."""
    path = record.path / "model.safetensors"
    if record.plan.split is None or record.plan.split.way == VERTICAL or not path.exists():
        return {}
    try:
        found = cut_exposure(record.plan, model_vector(record.plan, load_file(path)))
    except AtollError:
        return {}
    return {} if found is None else {"dcor": found.dcor, "psnr": found.psnr, "psnr_floor": found.psnr_floor}


def _federated(rows: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    """Return messages and time of rounds in which each client gets a broadcast and sends an update, all at once."""
    split = _split(plan)
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
