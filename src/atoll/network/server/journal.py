"""The journal of all runs: what happens is written to the store before memory changes and anybody is told.

After a kill the events since a coordinator's state was written are replayed, and a version that was being committed is
committed again: from the same updates, to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.commit.finish import Outcome, abandon, end_reason, is_spent, send_tasks
from atoll.commit.run_state import RunState
from atoll.core.coordinator import (
    Abandon,
    Arrived,
    Begin,
    Command,
    Commit,
    CoordinatorState,
    Deadline,
    Failed,
    Finish,
    Halt,
    Phase,
    Reason,
    Reject,
    Send,
)
from atoll.core.events import Event, RoundCommitted, RunEnded
from atoll.core.messages import Task
from atoll.ledger import chain
from atoll.network.server.auth import Authenticator, Clock
from atoll.network.server.ledger_records import cohort_entries, hash_of, public_participants, rejected_entries
from atoll.network.server.monitoring import Metrics, log
from atoll.network.server.presence import Offences, Presence
from atoll.network.server.runs import FIRST, CommitResult, Run, WaitingRun
from atoll.network.server.sent import layers_name
from atoll.network.server.sites import SiteAnswer
from atoll.network.server.tables import RunRow, Stage, TaskRow
from atoll.network.server.writer import Transaction

OVERFLOWED = "made the version overflow"
LONGEST_PAUSE = 60.0
"""Seconds after many abandoned attempts in a row."""
FEW_LOST = 10
"""So many lost tasks in a row are replaced at once; after more there is a pause."""


class Journal:
    """Steps the coordinators of runs inside of transactions, and writes what follows."""

    def __init__(
        self,
        runs: Mapping[str, WaitingRun | Run],
        presence: Presence,
        key: Ed25519PrivateKey,
        metrics: Metrics,
        clock: Clock,
        authenticator: Authenticator,
        wake: Callable[[set[int]], None],
        wake_writer: Callable[[], None],
    ) -> None:
        self._presence, self._key, self._metrics, self._clock = presence, key, metrics, clock
        self._wake, self._wake_writer = wake, wake_writer
        self.offences = Offences(runs, presence, authenticator, self.fail, wake)
        self.watch: Callable[[str, Event], None] = lambda run, event: None
        """Called with a run's name and an event, once it is written."""

    def opening(self, run: Run, machine: CoordinatorState) -> Begin | Halt:
        """Return the event that begins the next attempt, or ends a run whose privacy budget does not pay for it."""
        if run.halting is not None:
            return Halt(run.halting)
        return Halt(Reason.PRIVACY) if is_spent(run.parts, machine) else Begin(self._presence.may_be_asked(run))

    def open_evaluation(self, transaction: Transaction, run: Run, state_file: str) -> None:
        """Let clients measure the newest version, which is prepared, unless the run has ended meanwhile."""
        machine, _ = transaction.machine(run)
        if machine.phase is Phase.FINISHED:
            return
        self._start_ledger(transaction, run)
        transaction.tables.set_run(run.name, sizes=json.dumps(run.sizes))
        if state_file:
            transaction.tables.set_run(run.name, state=state_file)
            transaction.after_commit(lambda: run.files.remove_other_states(state_file))
        self._announce(transaction, run, machine.version)
        transaction.after_commit(lambda: run.sites.open(machine.version, self._clock.monotonic(), {}))
        transaction.after_commit(lambda: self._wake(set(self._presence.last_polls)))
        log("evaluating", run=run.name, round=machine.version)

    def record_answer(self, transaction: Transaction, run: Run, version: int, client: int, answer: SiteAnswer) -> None:
        """Record what a client answered about an open version; the first answer counts, a rejected one offends."""
        text = msgspec.json.encode(answer).decode()
        if version not in run.sites.answers or not transaction.tables.add_evaluation(run.name, version, client, text):
            return
        if answer.rejected:
            self.offences.count_offences(transaction, [client])
        transaction.after_commit(partial(run.sites.add, version, client, answer))
        transaction.after_commit(self._wake_writer)

    def close_evaluation(self, transaction: Transaction, run: Run, version: int, result: dict[str, Any]) -> None:
        """Record what clients measured of a version; answers about earlier ones are not needed any more."""
        row = run.files.row(version)
        if row is not None and "spread" in result:
            row = {**row, "clients_test": result["spread"]}
            transaction.tables.add_metrics_row(run.name, row)
        transaction.tables.drop_evaluations(run.name, version)
        transaction.after_commit(lambda: run.sites.close(version, result))
        transaction.after_commit(lambda: run.write_sites(result, row))
        transaction.after_commit(self._wake_writer)
        num, secret = sum("figures" in site for site in result["sites"]), result.get("secret", {})
        in_secret = {"in_secret": len(secret["clients"]) if "figures" in secret else 0} if secret else {}
        log("evaluated", run=run.name, round=version, clients=num, **in_secret, pooled=result.get("pooled"))

    def _start_ledger(self, transaction: Transaction, run: Run) -> None:
        """Write the first record of a run's ledger, if it is not there."""
        if _row(transaction, run).head == chain.EMPTY:
            first = {"run": run.name, "plan": run.client_plan, "plan_hash": run.plan_hash}
            self._add_ledger_record(transaction, run, chain.START, {**first, "model": hash_of(run.state.params_D)})
            transaction.after_commit(run.describe)

    def record_asked(self, transaction: Transaction, run: Run, state_file: str, measured: tuple[Event, ...]) -> None:
        """Begin an attempt, unless the run has ended meanwhile; what is to be sent is prepared."""
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.READY:
            return
        now = self._clock.monotonic()
        self._start_ledger(transaction, run)
        machine, commands = run.parts.coordinator.step(machine, self.opening(run, machine))
        transaction.set_machine(run, machine, seq)
        plain = json.dumps(machine.to_plain())
        transaction.tables.set_run(
            run.name, machine=plain, seq=seq, began=self._clock.wall(), sizes=json.dumps(run.sizes)
        )
        if state_file:
            transaction.tables.set_run(run.name, state=state_file)
            transaction.after_commit(lambda: run.files.remove_other_states(state_file))
        transaction.after_commit(lambda: setattr(run, "began", now))
        for command in commands:
            if isinstance(command, Send):
                self._publish(transaction, run, send_tasks(run.parts, machine.attempt, command.tasks))
                transaction.tables.add_tasks(run.name, command.tasks)
                transaction.after_commit(partial(run.count_down, command.tasks))
                self._announce(transaction, run, machine.version)
                numbers = {task.client for task in command.tasks}
                log("asked", run=run.name, round=machine.version + 1, clients=len(numbers))
                transaction.after_commit(partial(self._wake, numbers))
        self._record_measured(transaction, run, measured)
        self.execute(transaction, run, [command for command in commands if not isinstance(command, Send)])

    def arrived(
        self,
        transaction: Transaction,
        run: Run,
        task: Task,
        name: str,
        report: dict[str, Any],
        signature: bytes,
        data: bytes | None = None,
    ) -> str:
        """Record an update, which is stored in chunks unless there are `data`; return why it is refused, or ""."""
        machine, seq = transaction.machine(run)
        if machine.in_flight.get(task.client) != task:
            row = transaction.tables.task(run.name, task.attempt, task.client)
            same = row is not None and row.stage in (Stage.ARRIVED, Stage.COUNTED) and row.update == name
            return "" if same else "nobody waits for this update any more: poll for work"
        if machine.lost_in_a_row > FEW_LOST:
            transaction.after_commit(lambda: setattr(run, "not_before", 0.0))  # this one is not lost: the pause is over
        machine, commands = run.parts.coordinator.step(machine, Arrived((task,)))
        transaction.set_machine(run, machine, seq + 1)
        if any(isinstance(command, Reject) for command in commands):
            transaction.tables.set_stage(run.name, [task], Stage.CLOSED)
            return "this update comes too late: poll for work"
        if not name:
            row = transaction.tables.task(run.name, task.attempt, task.client)
            report = {} if row is None else dict(row.report)  # its place among those who were asked
        if data is not None:
            report = {**report, "spot": transaction.pack(run).add(task, data)}
        elif name:
            transaction.before_commit((run.name, task.attempt), lambda: run.uploads.sync(task.attempt))
        transaction.tables.set_arrived(run.name, task, name, report, signature, seq + 1)
        self.execute(transaction, run, commands)
        return ""

    def fail(self, transaction: Transaction, run: Run, tasks: list[Task], why: str) -> None:
        """Record that tasks have failed."""
        machine, seq = transaction.machine(run)
        commands: list[Command] = []
        for task in tasks:
            if machine.in_flight.get(task.client) != task:
                continue
            machine, more = run.parts.coordinator.step(machine, Failed((task,)))
            seq, commands = seq + 1, commands + more
            transaction.tables.set_failed(run.name, task, why[:500], seq)
        pause = _pause(machine.lost_in_a_row - FEW_LOST)
        if pause:
            transaction.after_commit(lambda: setattr(run, "not_before", self._clock.monotonic() + pause))
        transaction.set_machine(run, machine, seq)
        self.execute(transaction, run, commands)

    def deadline(self, transaction: Transaction, run: Run, attempt: int) -> None:
        """Record that the time of an attempt is over."""
        self._step(transaction, run, Deadline(attempt))

    def stop(self, transaction: Transaction, run: WaitingRun | Run) -> None:
        """End a run that the operator stops, with its newest version."""
        if isinstance(run, Run):
            self._step(transaction, run, Halt(Reason.INTERRUPTED))
            return
        ended = FIRST._replace(phase=Phase.FINISHED)
        transaction.tables.set_run(run.name, machine=json.dumps(ended.to_plain()))
        self._end(transaction, run, str(Reason.INTERRUPTED), ended.version)

    def _step(self, transaction: Transaction, run: Run, event: Deadline | Halt) -> None:
        machine, seq = transaction.machine(run)
        machine, commands = run.parts.coordinator.step(machine, event)
        transaction.set_machine(run, machine, seq)
        self.execute(transaction, run, commands)

    def execute(
        self, transaction: Transaction, run: Run, commands: list[Command], state: RunState | None = None
    ) -> None:
        """Write what the coordinator commands; workers and clients read it from its state.

        `state` is the run's state once the transaction is committed, if that changes it.
        """
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.COLLECTING:  # it includes all events so far
            transaction.tables.set_run(run.name, machine=json.dumps(machine.to_plain()), seq=seq)
            transaction.after_commit(self._wake_writer)
        for command in commands:
            match command:
                case Commit() if not run.parts.coordinator.policy.overlaps_rounds:
                    transaction.tables.close_open_tasks(run.name)
                case Abandon():
                    self._abandon(transaction, run, command)
                case Finish(reason):
                    self._finish(transaction, run, reason, run.state if state is None else state)

    def _abandon(self, transaction: Transaction, run: Run, command: Abandon) -> None:
        machine, _ = transaction.machine(run)
        attempt, reason = command.attempt, command.reason
        self._publish(transaction, run, abandon(run.parts, command))
        if not run.parts.coordinator.policy.overlaps_rounds:
            transaction.tables.close_open_tasks(run.name)
        rows = transaction.tables.tasks(run.name, attempt)
        self.offences.count_refusal_offences(transaction, run, rows)
        people = public_participants(run.parts.guard, attempt, {"rejected": rejected_entries(rows)})
        self._add_ledger_record(transaction, run, "abandon", {"attempt": attempt, "why": str(reason), **people})
        pause = _pause(machine.abandoned_in_a_row)
        transaction.after_commit(lambda: setattr(run, "not_before", self._clock.monotonic() + pause))
        self._metrics.abandoned(run.name)
        log("abandoned", run=run.name, attempt=attempt, why=str(reason))

    def _finish(self, transaction: Transaction, run: Run, why: Reason, state: RunState) -> None:
        """End a run; its ledger says so if it has begun."""
        machine, _ = transaction.machine(run)
        rows = transaction.tables.metrics_rows(run.name)
        reason = str(end_reason(why, rows[-1] if rows else None))
        if _row(transaction, run).head != chain.EMPTY:
            body = {"reason": reason, "version": machine.version, "model": hash_of(state.params_D)}
            if run.parts.parties is not None:
                body["layers"] = layers_name(run.parts, state.params_D)
            self._add_ledger_record(transaction, run, chain.END, body)
        transaction.tables.close_open_tasks(run.name)
        transaction.after_commit(lambda: run.write_result(reason))
        self._end(transaction, run, reason, machine.version)

    def _end(self, transaction: Transaction, run: WaitingRun | Run, reason: str, version: int) -> None:
        """Set the status of a run that has ended, and tell all clients."""
        self._publish(transaction, run, [RunEnded(reason=reason, version=version)])
        transaction.tables.set_run(run.name, status=reason)
        transaction.after_commit(lambda: setattr(run, "status", reason))
        transaction.after_commit(lambda: self._wake(set(self._presence.last_polls)))
        log("ended", run=run.name, round=version, why=reason)

    def record_commit(self, transaction: Transaction, run: Run, result: CommitResult, rows: list[TaskRow]) -> bool:
        """Record a commit; return False if the run was ended meanwhile."""
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.COMMITTING:
            return False
        before, outcome, done = machine, result.outcome, machine.committing
        commands: list[Command] = []
        if outcome.committed is not None:
            machine, commands = run.parts.coordinator.step(machine, outcome.committed)
        overflowed = [task for task in done if task.client in outcome.overflowed]
        left_out = [task for task in done if task not in outcome.counted and task not in overflowed]
        transaction.tables.set_stage(run.name, outcome.counted, Stage.COUNTED)
        transaction.tables.set_stage(run.name, left_out, Stage.CLOSED)
        if overflowed:
            rows = self._reject_overflowed(transaction, run, overflowed, rows)
        transaction.after_commit(lambda: setattr(run, "state", outcome.state))
        if outcome.row is not None:
            self._record_round(transaction, run, before, outcome, rows, left_out)
        self._record_measured(transaction, run, result.measured)
        if outcome.reason is not None and outcome.row is not None and run.plan.evaluation.clients_every:
            # clients measure the last version
            transaction.after_commit(lambda: setattr(run, "halting", outcome.reason))
        elif outcome.reason is not None:
            machine, more = run.parts.coordinator.step(machine, Halt(outcome.reason))
            commands = commands + more
        transaction.set_machine(run, machine, seq)
        transaction.tables.set_run(run.name, state=result.state_file)
        self.execute(transaction, run, commands, outcome.state)
        self.offences.clear_refusals(transaction, run, [task.client for task in outcome.counted])
        self.offences.count_offences(transaction, outcome.overflowed)
        if outcome.row is not None:
            self.offences.count_refusal_offences(transaction, run, rows)
        return True

    def _reject_overflowed(
        self, transaction: Transaction, run: Run, overflowed: list[Task], rows: list[TaskRow]
    ) -> list[TaskRow]:
        """Reject the updates that made a version overflow; return the rows of its attempts as they are then."""
        transaction.tables.reject_tasks(run.name, overflowed, OVERFLOWED)
        for task in overflowed:
            log("rejected", run=run.name, client=task.client, why=f"{OVERFLOWED}: quarantined in this run")
        attempts = {row.task.attempt for row in rows}
        return [row for attempt in sorted(attempts) for row in transaction.tables.tasks(run.name, attempt)]

    def _record_round(
        self,
        transaction: Transaction,
        run: Run,
        before: CoordinatorState,
        outcome: Outcome,
        rows: list[TaskRow],
        left_out: list[Task],
    ) -> None:
        """Write the metrics row and the ledger record of a round."""
        row, attempt, version = outcome.row or {}, before.attempt, before.version + 1
        transaction.tables.add_metrics_row(run.name, row)
        people = {
            "cohort": cohort_entries(rows, outcome.counted, transaction.tables.clients()),
            "rejected": rejected_entries(rows, left_out),
        }
        body = {
            "version": version,
            "attempt": attempt,
            "model": hash_of(outcome.state.params_D),
            "before": hash_of(run.state.params_D),
            "rule": run.plan.aggregator.name,
            **public_participants(run.parts.guard, attempt, people),
            "epsilon": row.get("privacy", {}).get("epsilon"),
            "seconds": int(self._clock.wall()),
        }
        self._add_ledger_record(transaction, run, "commit", body, outcome.events)
        counted = {task.client: task.attempt for task in outcome.counted}
        transaction.after_commit(lambda: run.counted.update(counted))
        accuracy = row.get("test", {}).get("accuracy")
        log("committed", run=run.name, round=version, clients=len(outcome.counted), accuracy=accuracy)

    def _record_measured(self, transaction: Transaction, run: Run, events: tuple[Event, ...]) -> None:
        """Write that the last round was measured after all."""
        for event in events:
            if isinstance(event, RoundCommitted):
                transaction.tables.add_metrics_row(run.name, event.row)
        if events:
            transaction.after_commit(lambda: run.append_files(events))
            self._publish(transaction, run, events)

    def _publish(self, transaction: Transaction, run: WaitingRun | Run, events: Iterable[Event]) -> None:
        """Call `watch` with events once they are written."""
        for event in events:
            transaction.after_commit(partial(self.watch, run.name, event))

    def _announce(self, transaction: Transaction, run: Run, version: int) -> None:
        """Write to the ledger what clients are sent of a version, before any client is sent it."""
        if version > run.announced:
            body = {"version": version, "object": run.models[version].ref.name}
            self._add_ledger_record(transaction, run, chain.BROADCAST, body)
            transaction.after_commit(lambda: setattr(run, "announced", version))

    def _add_ledger_record(
        self, transaction: Transaction, run: Run, kind: str, body: dict[str, Any], events: tuple[Event, ...] = ()
    ) -> None:
        """Add a record to a run's ledger, and the events that belong to it to its files."""
        head = _row(transaction, run).head
        first = kind == chain.START
        line, head = chain.start(body, self._key) if first else chain.add(head, kind, body, self._key)
        transaction.tables.add_ledger_line(run.name, line, head)
        transaction.after_commit(lambda: run.append_files(events, line))
        self._publish(transaction, run, events)


def _row(transaction: Transaction, run: Run) -> RunRow:
    """Return a run as the store has it, with earlier changes of the transaction."""
    row = transaction.tables.run(run.name)
    assert row is not None  # runs are never deleted
    return row


def _pause(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(num_failures, 10)) if num_failures > 0 else 0.0
