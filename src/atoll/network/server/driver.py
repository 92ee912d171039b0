"""The conductor: drives the machine of every run by what happens, and writes all of it down before anybody acts on it.

After a kill the events since a machine was last written down are given to it again, and a version that was being made
is made again: of the same updates, to the same bits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.commit.finish import abandon, end_reason, is_spent, send_tasks
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
from atoll.core.errors import AtollError
from atoll.core.events import Event, RoundCommitted, RunEnded
from atoll.core.messages import Task
from atoll.ledger import chain
from atoll.network.protocol.blobs import MakeBlobs, write_file
from atoll.network.server.auth import Authenticator, Refused
from atoll.network.server.clock import Clock
from atoll.network.server.ledger_records import cohort_entries, public_participants, rejected_entries
from atoll.network.server.logs import log
from atoll.network.server.metrics import Metrics
from atoll.network.server.offences import Offences
from atoll.network.server.presence import Presence
from atoll.network.server.runs import RUNNING, CommitResult, Run, hash_of, restore_run
from atoll.network.server.secure_session import STEP_SECONDS, SecureContext
from atoll.network.server.store import Store
from atoll.network.server.tables import Stage, TaskRow
from atoll.network.server.writer import Transaction, Writer

OVERFLOWED = "made the version overflow"
LONGEST_PAUSE = 60.0
"""Seconds after many attempts in a row that came to nothing."""
FEW_LOST = 10
"""So many lost tasks in a row are replaced at once; after more there is a pause."""
PROBE = 1 << 16
"""Bytes for which there must be room before it is said that there is some."""


class RunDriver:
    """All runs; `wake` is called with the numbers of the clients for whom there is news."""

    def __init__(
        self,
        home: Path,
        make_blobs: MakeBlobs,
        store: Store,
        key: Ed25519PrivateKey,
        metrics: Metrics,
        num_clients: int,
        clock: Clock,
        authenticator: Authenticator,
    ) -> None:
        self.home, self.make_blobs, self.store, self.now = home, make_blobs, store, clock.monotonic
        self._wall = clock.wall
        self._key, self._metrics, self._wanted = key, metrics, num_clients
        self.wake: Callable[[set[int]], None] = lambda numbers: None
        self.watch: Callable[[str, Event], None] = lambda run, event: None
        """Told what happens in which run, once it is written down."""
        self.runs: dict[str, Run] = {}
        self.read_only_reason = ""
        """Why nothing can be written, if so."""
        self._next_try = 0.0
        """When to try again whether something can be written."""
        self._stopping = False
        self.writer = Writer(store, self._tick, self.set_read_only)
        torch.set_num_threads(1)  # as in a simulation, and before there are makers: each keeps what it begins with
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="commit")
        with store.read() as tables:
            self.presence = Presence(tables.clients(), self.now)
            self.presence.set_clients(tables.clients(), tables.agreed_samples())
            self.offences = Offences(
                self.runs, self.presence, authenticator, self.fail, lambda numbers: self.wake(numbers)
            )
            for row in tables.runs():
                run = self.runs[row.id] = restore_run(tables, row, home, make_blobs, self.notify)
                if row.began:  # how long nobody was there to wait is not known: the deadline begins anew
                    run.began = self.now()
                metrics.at_round(row.id, self.runs[row.id].machine.version)

    def notify(self, numbers: set[int]) -> None:
        """There is news for these clients."""
        self.wake(numbers)

    def close(self) -> None:
        """End politely: what is being made is finished, and everything is written down."""
        self._stopping = True
        for run in self.runs.values():
            run.mailbox.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.writer.stop()
        self.store.close()
        for run in self.runs.values():
            run.files.close()

    def _tick(self) -> None:
        """Begin what can begin, and close what has taken too long."""
        if self._stopping:
            return
        self._metrics.online(len(self.presence.online()))
        self._recover()
        with self.writer.lock:
            for run in self.runs.values():
                if run.status != RUNNING or run.busy or self.now() < run.not_before:
                    continue
                if run.machine.phase is Phase.READY and self._can_begin(run):
                    self._start_work(run, self._begin)
                elif run.machine.phase is Phase.COMMITTING:
                    self._start_work(run, self._commit_version)
                elif run.machine.phase is Phase.COLLECTING and self._is_late(run):
                    attempt = run.machine.attempt
                    run.busy = True
                    closed = self.writer.submit(
                        lambda transaction, run=run, attempt=attempt: self._deadline(transaction, run, attempt)  # type: ignore[misc]
                    )
                    closed.add_done_callback(lambda done, run=run: setattr(run, "busy", False))  # type: ignore[misc]

    def _can_begin(self, run: Run) -> bool:
        if run.parts is None:
            known = self.presence.clients.values()
            return len(known) >= max(self._wanted, run.min_clients) and all(client.num_samples for client in known)
        policy, machine = run.parts.coordinator.policy, run.machine
        if machine.in_flight or len(machine.arrived) >= policy.goal(run.parts.coordinator.num_clients):
            return True  # somebody is waited for, or enough are here
        if machine.version >= run.parts.coordinator.rounds:
            return True  # nobody need be there for the end
        waiting = {task.client for task in machine.arrived}
        may = self.presence.may_be_asked(run)
        least = 1 if policy.overlaps_rounds else max(1, policy.min_reports)
        if sum(may(client) and client not in waiting for client in self.presence.clients) >= least:
            return True
        self._log_missing_clients(run, least)
        return False

    def _log_missing_clients(self, run: Run, least: int) -> None:
        """Log once that a run waits since clients take no part in it."""
        assert run.state is not None
        out = {client for client, known in run.refusals.items() if known.whole_run} | set(run.state.quarantined)
        left = len(self.presence.clients.keys() - out)
        if left < least <= len(self.presence.clients) and run.missing != out:
            why = f"{left} clients take part, a round needs {least}: approve others, or those who refused once more"
            log("waiting", run=run.name, why=why)
            run.missing = out

    def _is_late(self, run: Run) -> bool:
        assert run.parts is not None
        deadline = run.parts.coordinator.policy.deadline
        return deadline is not None and self.now() > run.began + deadline

    def _start_work(self, run: Run, work: Callable[[Run], None]) -> None:
        """Let a maker work on a run."""
        run.busy = True
        self._workers.submit(self._work_safely, run, work)

    def _work_safely(self, run: Run, work: Callable[[Run], None]) -> None:
        try:
            work(run)
        except Exception as error:
            if isinstance(error, Refused) or self.writer.as_unavailable(error) is not None:
                run.not_before = self.now() + 1.0
            else:  # the next process may try again, such as with more memory
                kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
                why = " ".join(f"{kind}{error}".split())
                log("ended", run=run.name, why=why)
                run.status = f"failed: {why}"
        finally:
            run.busy = False
            self.writer.wake()

    def _set_status(self, transaction: Transaction, run: Run, status: str) -> None:
        transaction.tables.set_run(run.name, status=status)
        transaction.after_commit(lambda: setattr(run, "status", status))

    def _begin(self, run: Run) -> None:
        """Ask clients, once what they are to be sent is ready."""
        with self.writer.lock:
            sizes, cut = self.presence.sizes(run), self.presence.capped_samples(run)
        if run.parts is None or (sizes != run.sizes and run.plan.privacy is None):
            for client, (said, counts) in cut.items():
                why = f"says {said} samples, counts as {counts}: atoll clients approve NAME --samples N agrees to more"
                log("cut", run=run.name, client=client, why=why)
            run.build(sizes, "")
        assert run.parts is not None
        machine = run.machine
        if machine.phase is not Phase.READY:
            return
        _, commands = run.parts.coordinator.step(machine, self._opening(run, machine))
        ends = any(isinstance(command, Finish) for command in commands)  # then nobody is sent anything
        changed = "" if ends else run.prepare_broadcast(machine)
        measured = run.measure_last() if ends else ()
        self.writer.write(lambda transaction: self._record_asked(transaction, run, changed, measured))

    def _opening(self, run: Run, machine: CoordinatorState) -> Begin | Halt:
        """The event that begins the next attempt, or ends a run whose privacy does not pay for it."""
        assert run.parts is not None
        return Halt(Reason.PRIVACY) if is_spent(run.parts, machine) else Begin(self.presence.may_be_asked(run))

    def _record_asked(self, transaction: Transaction, run: Run, state_file: str, measured: tuple[Event, ...]) -> None:
        assert run.parts is not None and run.state is not None
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.READY:
            return
        now = self.now()
        if transaction.tables.run(run.name).head == chain.EMPTY:  # type: ignore[union-attr]
            first = {"run": run.name, "plan": run.client_plan, "plan_hash": run.plan_hash}
            self._add_ledger_record(transaction, run, chain.START, {**first, "model": hash_of(run.state.params_D)})
            transaction.after_commit(lambda: run.write_files(run.write_info))
        machine, commands = run.parts.coordinator.step(machine, self._opening(run, machine))
        transaction.set_machine(run, machine, seq)
        sizes = json.dumps(run.sizes)
        transaction.tables.set_run(
            run.name, machine=json.dumps(machine.to_plain()), seq=seq, began=self._wall(), sizes=sizes
        )
        if state_file:
            transaction.tables.set_run(run.name, state=state_file)
            transaction.after_commit(lambda: run.remove_other_states(state_file))
        transaction.after_commit(lambda: setattr(run, "began", now))
        for command in commands:
            if isinstance(command, Send):
                self._publish(transaction, run, send_tasks(run.parts, machine.attempt, command.tasks))
                transaction.tables.add_tasks(run.name, command.tasks)
                transaction.after_commit(partial(run.count_down, command.tasks))
                self._announce(transaction, run, machine.version)
                numbers = {task.client for task in command.tasks}
                log("asked", run=run.name, round=machine.version + 1, clients=len(numbers))
                transaction.after_commit(lambda numbers=numbers: self.wake(numbers))  # type: ignore[misc]
        self._measured(transaction, run, measured)
        self.execute(transaction, run, [command for command in commands if not isinstance(command, Send)])

    def _measured(self, transaction: Transaction, run: Run, events: tuple[Event, ...]) -> None:
        """Write down that the last round was measured after all."""
        for event in events:
            if isinstance(event, RoundCommitted):
                transaction.tables.add_metrics_row(run.name, event.row)
        if events:
            transaction.after_commit(lambda: run.write_files(lambda: run.append_files(events)))
            self._publish(transaction, run, events)

    def _publish(self, transaction: Transaction, run: Run, events: Iterable[Event]) -> None:
        """Tell those who watch, once it is written down."""
        for event in events:
            transaction.after_commit(partial(self.watch, run.name, event))

    def _announce(self, transaction: Transaction, run: Run, version: int) -> None:
        """Say in the ledger what clients are sent of a version, before anybody is sent it."""
        if version > run.announced:
            self._add_ledger_record(
                transaction, run, chain.BROADCAST, {"version": version, "object": run.models[version].ref.name}
            )
            transaction.after_commit(lambda: setattr(run, "announced", version))

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
        """Write down an update, which is here in chunks unless there are `data`; why it is not wanted, if so."""
        assert run.parts is not None
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
        if data is not None:
            report = {**report, "spot": transaction.pack(run).add(task, data)}
        elif name:
            transaction.before_commit((run.name, task.attempt), lambda: run.uploads.sync(task.attempt))
        transaction.tables.set_arrived(run.name, task, name, report, signature, seq + 1)
        self.execute(transaction, run, commands)
        return ""

    def fail(self, transaction: Transaction, run: Run, tasks: list[Task], why: str) -> None:
        """Write down that nothing will come of tasks."""
        assert run.parts is not None
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
            transaction.after_commit(lambda: setattr(run, "not_before", self.now() + pause))
        transaction.set_machine(run, machine, seq)
        self.execute(transaction, run, commands)

    def _deadline(self, transaction: Transaction, run: Run, attempt: int) -> None:
        assert run.parts is not None
        machine, seq = transaction.machine(run)
        machine, commands = run.parts.coordinator.step(machine, Deadline(attempt))
        transaction.set_machine(run, machine, seq)
        self.execute(transaction, run, commands)

    def execute(self, transaction: Transaction, run: Run, commands: list[Command]) -> None:
        """Write down what the machine wants; makers and clients find it in its state."""
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.COLLECTING:  # what has happened so far is in it
            transaction.tables.set_run(run.name, machine=json.dumps(machine.to_plain()), seq=seq)
            transaction.after_commit(self.writer.wake)
        for command in commands:
            match command:
                case Commit() if run.parts is not None and not run.parts.coordinator.policy.overlaps_rounds:
                    transaction.tables.close_open_tasks(run.name)
                case Abandon():
                    self._abandoned(transaction, run, command)
                case Finish(reason):
                    self._finished(transaction, run, reason)
                case _:
                    pass

    def _abandoned(self, transaction: Transaction, run: Run, command: Abandon) -> None:
        assert run.parts is not None
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
        transaction.after_commit(lambda: setattr(run, "not_before", self.now() + pause))
        self._metrics.abandoned(run.name)
        log("abandoned", run=run.name, attempt=attempt, why=str(reason))

    def _finished(self, transaction: Transaction, run: Run, why: Reason) -> None:
        machine, _ = transaction.machine(run)
        rows = transaction.tables.metrics_rows(run.name)
        reason = str(end_reason(why, rows[-1] if rows else None))
        self._publish(transaction, run, [RunEnded(reason=reason, version=machine.version)])
        model = hash_of(run.state.params_D) if run.state is not None else ""
        if run.state is not None:
            self._add_ledger_record(
                transaction, run, chain.END, {"reason": reason, "version": machine.version, "model": model}
            )
        transaction.tables.close_open_tasks(run.name)
        self._set_status(transaction, run, reason)
        transaction.after_commit(lambda: run.write_files(lambda: run.write_result(reason)))
        transaction.after_commit(lambda: self.wake(set(self.presence.last_polls)))
        log("ended", run=run.name, round=machine.version, why=reason)

    def _commit_version(self, run: Run) -> None:
        """Make a version of what has arrived."""
        started = time.perf_counter()
        machine = run.machine
        with self.store.read() as tables:
            attempts = {task.attempt for task in machine.committing}
            rows = [row for attempt in attempts for row in tables.tasks(run.name, attempt)]
        secret = None
        if run.parts is not None and run.parts.job.secure is not None:
            secret = SecureContext(
                self._key, self.presence.keys(), run.mailbox, run.parts.coordinator.policy.deadline or STEP_SECONDS
            )
        result = run.commit(machine, {row.task: row for row in rows}, self.now(), secret)
        taken = self.writer.write(lambda transaction: self._record_commit(transaction, run, result, rows))
        with self.store.read() as tables:
            known = tables.run(run.name)
        assert known is not None
        run.drop_tasks(machine.committing, known.state)
        if taken and result.outcome.row is not None:
            self._metrics.committed(run.name, machine.version + 1, time.perf_counter() - started)

    def _record_commit(self, transaction: Transaction, run: Run, result: CommitResult, rows: list[TaskRow]) -> bool:
        """Write down what was made; False if somebody has ended the run meanwhile."""
        assert run.parts is not None and run.state is not None
        machine, seq = transaction.machine(run)
        if machine.phase is not Phase.COMMITTING:
            return False
        outcome, done, attempt = result.outcome, machine.committing, machine.attempt
        before = hash_of(run.state.params_D)
        commands: list[Command] = []
        if outcome.committed is not None:
            machine, commands = run.parts.coordinator.step(machine, outcome.committed)
        overflowed = [task for task in done if task.client in outcome.overflowed]
        left_out = [task for task in done if task not in outcome.counted and task not in overflowed]
        transaction.tables.set_stage(run.name, outcome.counted, Stage.COUNTED)
        transaction.tables.set_stage(run.name, left_out, Stage.CLOSED)
        if overflowed:
            transaction.tables.reject_tasks(run.name, overflowed, OVERFLOWED)
            attempts = {row.task.attempt for row in rows}
            rows = [row for number in sorted(attempts) for row in transaction.tables.tasks(run.name, number)]
            for client in outcome.overflowed:
                log("rejected", run=run.name, client=client, why=f"{OVERFLOWED}: quarantined in this run")
        transaction.after_commit(lambda: setattr(run, "state", outcome.state))
        if outcome.row is not None:
            transaction.tables.add_metrics_row(run.name, outcome.row)
            counted = set(outcome.counted)
            people = {
                "cohort": cohort_entries(rows, outcome.counted, transaction.tables.clients()),
                "rejected": rejected_entries(rows, left_out),
            }
            body = {
                "version": machine.version,
                "attempt": attempt,
                "model": hash_of(outcome.state.params_D),
                "before": before,
                "rule": run.plan.aggregator.name,
                **public_participants(run.parts.guard, attempt, people),
                "epsilon": outcome.row.get("privacy", {}).get("epsilon"),
                "seconds": int(self._wall()),
            }
            self._add_ledger_record(transaction, run, "commit", body, outcome.events)
            transaction.after_commit(lambda: run.counted.update({task.client: task.attempt for task in counted}))
            accuracy = outcome.row.get("test", {}).get("accuracy")
            log("committed", run=run.name, round=machine.version, clients=len(counted), accuracy=accuracy)
        self._measured(transaction, run, result.measured)
        if outcome.reason is not None:
            machine, more = run.parts.coordinator.step(machine, Halt(outcome.reason))
            commands = commands + more
        transaction.set_machine(run, machine, seq)
        transaction.tables.set_run(run.name, state=result.state_file)
        run_state = run.state
        run.state = outcome.state  # what follows is told of the new version
        try:
            self.execute(transaction, run, commands)
        finally:
            run.state = run_state
        self.offences.clear_refusals(transaction, run, [task.client for task in outcome.counted])
        self.offences.count_offences(transaction, outcome.overflowed)
        if outcome.row is not None:
            self.offences.count_refusal_offences(transaction, run, rows)
        return True

    def _add_ledger_record(
        self, transaction: Transaction, run: Run, kind: str, body: dict[str, Any], events: tuple[Event, ...] = ()
    ) -> None:
        """Add a record to a run's ledger, and what happened with it to its files."""
        known = transaction.tables.run(run.name)
        assert known is not None
        first = kind == chain.START
        line, head = chain.start(body, self._key) if first else chain.add(known.head, kind, body, self._key)
        transaction.tables.add_ledger_line(run.name, line, head)
        transaction.after_commit(lambda: run.write_files(lambda: run.append_files(events, line)))
        self._publish(transaction, run, events)

    def _recover(self) -> None:
        """Every second, try whether what could not be written can be now."""
        if self.now() < self._next_try:
            return
        self._next_try = self.now() + 1.0
        if self.read_only_reason:
            self.writer.submit(self._try_to_write)
            return
        for run in self.runs.values():
            if run.files_stale:
                self._rewrite_files(run)

    def _try_to_write(self, transaction: Transaction) -> None:
        """Find out whether disk and store take something again."""
        probe = self.home / ".room"
        write_file(probe, self.home / ".room.new", bytes(PROBE))
        probe.unlink()
        transaction.tables.probe_write(self._wall())
        transaction.after_commit(lambda: self.set_read_only(""))

    def _rewrite_files(self, run: Run) -> None:
        """Make the files for people as the store has them."""
        try:
            with self.store.read() as tables:
                run.rewrite_files(tables.metrics_rows(run.name), tables.ledger_lines(run.name))
        except Exception as error:
            self.writer.as_unavailable(error)

    def set_read_only(self, why: str) -> None:
        """Say when nothing can be written, and when it can again."""
        if why and not self.read_only_reason:
            log("read_only", why=why)
        if self.read_only_reason and not why:
            log("recovered")
        self.read_only_reason = why
        self._metrics.read_only(bool(why))


def _pause(num_failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(num_failures, 10)) if num_failures > 0 else 0.0
