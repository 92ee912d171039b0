"""Restore runs from the store as they were when the process before this one ended, however it did."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.commit.finish import why_stop
from atoll.core.coordinator import Arrived, CoordinatorState, Failed, Phase
from atoll.core.messages import SERVER
from atoll.core.plan import Plan
from atoll.ledger import chain
from atoll.network.protocol.blobs import MakeBlobs
from atoll.network.server.queries import Tables
from atoll.network.server.runs import NEVER, RUNNING, Run, WaitingRun
from atoll.network.server.sites import SecretSum, SiteAnswer
from atoll.network.server.tables import RunRow, Stage
from atoll.network.server.uploads import position_of


def restore_run(
    tables: Tables, row: RunRow, home: Path, make_blobs: MakeBlobs, wake: Callable[[set[int]], None]
) -> WaitingRun | Run:
    """Restore a run as it was when the process before this one ended, however it did."""
    waiting = WaitingRun(row.id, Plan.from_toml(row.plan), home, make_blobs, wake, row.status)
    if not row.sizes:  # no client was asked
        return waiting
    run = waiting.build(row.sizes, CoordinatorState.from_plain(json.loads(row.machine)), row.seq, row.state)
    run.counted = tables.last_counted(row.id)
    lines = tables.ledger_lines(row.id)
    run.announced = _announced(lines)
    run.set_refusals(tables.refusals(row.id))
    for event in tables.task_events(row.id, row.seq):
        kind = Arrived if event.stage in (Stage.ARRIVED, Stage.COUNTED) else Failed
        run.machine, _ = run.parts.coordinator.step(run.machine, kind((event.task,)))
        run.seq = event.seq
    needed = {*run.machine.arrived, *run.machine.committing}
    for attempt in {task.attempt for task in needed}:
        for each in tables.tasks(row.id, attempt):
            position = position_of(each)
            if each.task in needed and position is not None:
                run.uploads.restore(each.task, position)
    if run.status == RUNNING and run.machine.phase is not Phase.FINISHED:
        run.prepare_broadcast(run.machine)
        for attempt in range(run.state.coordinator.attempt, run.machine.attempt + 1):  # since it was saved
            run.count_down(each.task for each in tables.tasks(row.id, attempt))
        run.lost_sum = run.parts.job.secure is not None and run.machine.phase is Phase.COMMITTING
    rows = tables.metrics_rows(row.id)
    run.rewrite_files(rows, lines)
    _restore_sites(run, tables, rows)
    run.remove_stale_files(row.state)
    return run


def _restore_sites(run: Run, tables: Tables, rows: Sequence[dict[str, Any]]) -> None:
    """Open the evaluation of the newest version again, with its answers, if clients were asked for it."""
    if not run.plan.evaluation.clients_every or run.status != RUNNING:
        return
    version = run.machine.version
    run.halting = why_stop(run.plan.stop, rows[-1]) if rows else None
    last = run.halting is not None or version >= run.parts.coordinator.rounds
    if run.announced == version and run.sites.is_due(version, last=last):
        run.prepare_sites()
        answers = tables.evaluations(run.name).get(version, {})
        if SERVER in answers:
            run.sites.secret_sums[version] = msgspec.json.decode(answers.pop(SERVER), type=SecretSum)
        known = {client: msgspec.json.decode(text, type=SiteAnswer) for client, text in answers.items()}
        run.sites.open(version, time.monotonic(), known)


def _announced(lines: Sequence[str]) -> int:
    """Return the newest version of which a ledger says what was sent."""
    for line in reversed(lines):
        record, _ = chain.read(line)
        if record.kind == chain.BROADCAST:
            return int(record.body["version"])
    return NEVER
