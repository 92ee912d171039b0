"""Sessions of a run's round: how they are held when its version is committed, and what the store's rows say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.core.coordinator import Phase
from atoll.core.messages import Task
from atoll.network.server.held import HeldRound, RoundContext
from atoll.network.server.joint_round import JointRound
from atoll.network.server.monitoring import log
from atoll.network.server.presence import Presence
from atoll.network.server.runs import RUNNING, Run
from atoll.network.server.secure_session import STEP_SECONDS
from atoll.network.server.split_round import SplitRound
from atoll.network.server.tables import Stage, TaskRow
from atoll.split.parties import Parties


def hold_sessions(
    run: Run, rows: Mapping[Task, TaskRow], presence: Presence, is_stopping: Callable[[], bool]
) -> HeldRound | None:
    """Hold the sessions of the round that a run commits; None where its plan has no cut.

    Clients come in the order in which they were drawn, whoever was ready first. A batch may take as long as the plan's
    deadline says.
    """
    parties, streams, machine = run.parts.parties, run.streams, run.machine
    if parties is None or streams is None:
        return None

    def is_wanted() -> bool:
        return not is_stopping() and run.status == RUNNING and run.machine.phase is Phase.COMMITTING

    tasks = sorted(machine.committing, key=lambda task: rows[task].report.get("place", 0))
    context = RoundContext(
        streams=streams,
        seconds=run.parts.coordinator.policy.deadline or STEP_SECONDS,
        is_wanted=is_wanted,
        is_known=lambda client: client in presence.clients,
    )
    start_M = parties.job.model_of(run.state.sent[machine.version])
    if isinstance(parties, Parties):
        held = SplitRound(parties, tasks, start_M, context).hold()
    else:
        held = JointRound(parties, tasks, start_M, context).hold()
    for task, why in held.failed.items():
        log("rejected", run=run.name, client=task.client, why=why)
    return held


def with_session(row: TaskRow, held: HeldRound) -> TaskRow:
    """Return the row of a task with what its client signed at the end of its session, or why that failed."""
    if row.task in held.failed:
        return row._replace(stage=Stage.FAILED, report={"why": held.failed[row.task][:500]})
    end = held.signed.get(row.task)
    if end is None or end.transcript is None or end.signature is None:
        return row
    return row._replace(update=end.transcript, report=held.reports[row.task], signature=end.signature)
