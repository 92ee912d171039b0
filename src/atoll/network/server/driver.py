"""The conductor: drives the machine of every run by what happens, and writes all of it down before anybody acts on it.

After a kill the events since a machine was last written down are given to it again, and a version that was being made
is made again: of the same updates, to the same bits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.commit.finish import end_reason
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
from atoll.core.messages import Task
from atoll.ledger import chain
from atoll.network.protocol.blobs import Place, written
from atoll.network.server.auth import Gate, Refused
from atoll.network.server.clock import Clock
from atoll.network.server.ledger_records import cohort_of, rejected_of, told
from atoll.network.server.logs import log
from atoll.network.server.metrics import Metrics
from atoll.network.server.offences import Offences
from atoll.network.server.presence import Roll
from atoll.network.server.runs import RUNNING, Made, Run, hash_of, taken_up
from atoll.network.server.secure_session import STEP_SECONDS, Secret
from atoll.network.server.store import Store
from atoll.network.server.tables import Stage, TaskRow
from atoll.network.server.writer import Clerk, Draft

OVERFLOWED = "made the version overflow"
LONGEST_PAUSE = 60.0
"""Seconds after many attempts in a row that came to nothing."""
FEW_LOST = 10
"""So many lost tasks in a row are replaced at once; after more there is a pause."""
PROBE = 1 << 16
"""Bytes for which there must be room before it is said that there is some."""


class Conductor:
    """All runs; `wake` is called with the numbers of the clients for whom there is news."""

    def __init__(
        self,
        home: Path,
        place: Place,
        store: Store,
        key: Ed25519PrivateKey,
        metrics: Metrics,
        num_clients: int,
        clock: Clock,
        gate: Gate,
    ) -> None:
        self.home, self.place, self.store, self.now = home, place, store, clock.monotonic
        self._wall = clock.wall
        self._key, self._metrics, self._wanted = key, metrics, num_clients
        self.wake: Callable[[set[int]], None] = lambda numbers: None
        self.runs: dict[str, Run] = {}
        self.why = ""
        """Why nothing can be written, if so."""
        self._next_try = 0.0
        """When to try again whether something can be written."""
        self._stopping = False
        self.clerk = Clerk(store, self._tick, self.trouble)
        torch.set_num_threads(1)  # as in a simulation, and before there are makers: each keeps what it begins with
        self._makers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="maker")
        with store.look() as book:
            self.roll = Roll(book.clients(), self.now)
            self.roll.know(book.clients(), book.agreed())
            self.offences = Offences(self.runs, self.roll, gate, self.fail, lambda numbers: self.wake(numbers))
            for row in book.runs():
                run = self.runs[row.id] = taken_up(book, row, home, place, self.ring)
                if row.began:  # how long nobody was there to wait is not known: the deadline begins anew
                    run.began = self.now()
                metrics.at_round(row.id, self.runs[row.id].machine.version)

    def ring(self, numbers: set[int]) -> None:
        """There is news for these clients."""
        self.wake(numbers)

    def close(self) -> None:
        """End politely: what is being made is finished, and everything is written down."""
        self._stopping = True
        for run in self.runs.values():
            run.post.close()
        self._makers.shutdown(wait=True, cancel_futures=True)
        self.clerk.stop()
        self.store.close()
        for run in self.runs.values():
            run.files.close()

    def _tick(self) -> None:
        """Begin what can begin, and close what has taken too long."""
        if self._stopping:
            return
        self._metrics.online(len(self.roll.online()))
        self._recover()
        with self.clerk.lock:
            for run in self.runs.values():
                if run.status != RUNNING or run.busy or self.now() < run.not_before:
                    continue
                if run.machine.phase is Phase.READY and self._can_begin(run):
                    self._do(run, self._begin)
                elif run.machine.phase is Phase.COMMITTING:
                    self._do(run, self._make)
                elif run.machine.phase is Phase.COLLECTING and self._is_late(run):
                    attempt = run.machine.attempt
                    run.busy = True
                    closed = self.clerk.submit(
                        lambda draft, run=run, attempt=attempt: self._deadline(draft, run, attempt)  # type: ignore[misc]
                    )
                    closed.add_done_callback(lambda done, run=run: setattr(run, "busy", False))  # type: ignore[misc]

    def _can_begin(self, run: Run) -> bool:
        if run.parts is None:
            known = self.roll.clients.values()
            return len(known) >= max(self._wanted, run.min_clients) and all(client.num_samples for client in known)
        policy, machine = run.parts.coordinator.policy, run.machine
        if machine.in_flight or len(machine.arrived) >= policy.goal(run.parts.coordinator.num_clients):
            return True  # somebody is waited for, or enough are here
        if machine.version >= run.parts.coordinator.rounds:
            return True  # nobody need be there for the end
        waiting = {task.client for task in machine.arrived}
        may = self.roll.may_be_asked(run)
        least = 1 if policy.overlaps_rounds else max(1, policy.min_reports)
        if sum(may(client) and client not in waiting for client in self.roll.clients) >= least:
            return True
        self._say_who_is_missing(run, least)
        return False

    def _say_who_is_missing(self, run: Run, least: int) -> None:
        """Log once that a run waits since clients take no part in it."""
        assert run.state is not None
        out = {client for client, known in run.refusals.items() if known.whole_run} | set(run.state.quarantined)
        left = len(self.roll.clients.keys() - out)
        if left < least <= len(self.roll.clients) and run.missing != out:
            why = f"{left} clients take part, a round needs {least}: approve others, or those who refused once more"
            log("waiting", run=run.name, why=why)
            run.missing = out

    def _is_late(self, run: Run) -> bool:
        assert run.parts is not None
        deadline = run.parts.coordinator.policy.deadline
        return deadline is not None and self.now() > run.began + deadline

    def _do(self, run: Run, work: Callable[[Run], None]) -> None:
        """Let a maker work on a run."""
        run.busy = True
        self._makers.submit(self._try, run, work)

    def _try(self, run: Run, work: Callable[[Run], None]) -> None:
        try:
            work(run)
        except Exception as error:
            if isinstance(error, Refused) or self.clerk.busy(error) is not None:
                run.not_before = self.now() + 1.0
            else:  # the next process may try again, such as with more memory
                kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
                why = " ".join(f"{kind}{error}".split())
                log("ended", run=run.name, why=why)
                run.status = f"failed: {why}"
        finally:
            run.busy = False
            self.clerk.nudge()

    def _set_status(self, draft: Draft, run: Run, status: str) -> None:
        draft.book.set_run(run.name, status=status)
        draft.then(lambda: setattr(run, "status", status))

    def _begin(self, run: Run) -> None:
        """Ask clients, once what they are to be sent is ready."""
        with self.clerk.lock:
            sizes, cut = self.roll.sizes(run), self.roll.cut(run)
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
        changed = "" if ends else run.prepare(machine)
        measured = run.measure_last() if ends else None
        self.clerk.make(lambda draft: self._asked(draft, run, changed, measured))

    def _opening(self, run: Run, machine: CoordinatorState) -> Begin | Halt:
        """The event that begins the next attempt, or ends a run whose privacy does not pay for it."""
        assert run.parts is not None
        guard, more = run.parts.guard, machine.version < run.parts.coordinator.rounds
        spent = guard is not None and more and not guard.allows(machine.attempt)
        return Halt(Reason.PRIVACY) if spent else Begin(self.roll.may_be_asked(run))

    def _asked(self, draft: Draft, run: Run, state_file: str, measured: dict[str, Any] | None) -> None:
        assert run.parts is not None and run.state is not None
        machine, seq = draft.machine(run)
        if machine.phase is not Phase.READY:
            return
        guard, now = run.parts.guard, self.now()
        if draft.book.run(run.name).head == chain.EMPTY:  # type: ignore[union-attr]
            first = {"run": run.name, "plan": run.told_plan, "plan_hash": run.plan_hash}
            self._note(draft, run, chain.START, {**first, "model": hash_of(run.state.params_D)})
            draft.then(lambda: run.tell(run.describe))
        machine, commands = run.parts.coordinator.step(machine, self._opening(run, machine))
        draft.move(run, machine, seq)
        sizes = json.dumps(run.sizes)
        draft.book.set_run(run.name, machine=json.dumps(machine.to_plain()), seq=seq, began=self._wall(), sizes=sizes)
        if state_file:
            draft.book.set_run(run.name, state=state_file)
            draft.then(lambda: run.keep_state(state_file))
        draft.then(lambda: setattr(run, "began", now))
        for command in commands:
            if isinstance(command, Send):
                if guard is not None and guard.trusts_nobody:
                    guard.charge(machine.attempt)
                draft.book.add_tasks(run.name, command.tasks)
                self._announce(draft, run, machine.version)
                numbers = {task.client for task in command.tasks}
                log("asked", run=run.name, round=machine.version + 1, clients=len(numbers))
                draft.then(lambda numbers=numbers: self.wake(numbers))  # type: ignore[misc]
        self._measured(draft, run, measured)
        self.follow(draft, run, [command for command in commands if not isinstance(command, Send)])

    def _measured(self, draft: Draft, run: Run, row: dict[str, Any] | None) -> None:
        """Write down that the last round was measured after all."""
        if row is not None:
            draft.book.add_row(run.name, row)
            draft.then(lambda: run.tell(lambda: run.replace_row(row)))

    def _announce(self, draft: Draft, run: Run, version: int) -> None:
        """Say in the ledger what clients are sent of a version, before anybody is sent it."""
        if version > run.announced:
            self._note(draft, run, chain.BROADCAST, {"version": version, "object": run.models[version].ref.name})
            draft.then(lambda: setattr(run, "announced", version))

    def arrived(
        self,
        draft: Draft,
        run: Run,
        task: Task,
        name: str,
        report: dict[str, Any],
        signature: bytes,
        data: bytes | None = None,
    ) -> str:
        """Write down an update, which is here in chunks unless there are `data`; why it is not wanted, if so."""
        assert run.parts is not None
        machine, seq = draft.machine(run)
        if machine.in_flight.get(task.client) != task:
            row = draft.book.task(run.name, task.attempt, task.client)
            same = row is not None and row.stage in (Stage.ARRIVED, Stage.COUNTED) and row.update == name
            return "" if same else "nobody waits for this update any more: poll for work"
        if machine.lost_in_a_row > FEW_LOST:
            draft.then(lambda: setattr(run, "not_before", 0.0))  # this one is not lost: the pause is over
        machine, commands = run.parts.coordinator.step(machine, Arrived((task,)))
        draft.move(run, machine, seq + 1)
        if any(isinstance(command, Reject) for command in commands):
            draft.book.set_stage(run.name, [task], Stage.CLOSED)
            return "this update comes too late: poll for work"
        if data is not None:
            report = {**report, "spot": draft.pack(run).add(task, data)}
        elif name:
            draft.first((run.name, task.attempt), lambda: run.uploads.sync(task.attempt))
        draft.book.arrived(run.name, task, name, report, signature, seq + 1)
        self.follow(draft, run, commands)
        return ""

    def fail(self, draft: Draft, run: Run, tasks: list[Task], why: str) -> None:
        """Write down that nothing will come of tasks."""
        assert run.parts is not None
        machine, seq = draft.machine(run)
        commands: list[Command] = []
        for task in tasks:
            if machine.in_flight.get(task.client) != task:
                continue
            machine, more = run.parts.coordinator.step(machine, Failed((task,)))
            seq, commands = seq + 1, commands + more
            draft.book.failed(run.name, task, why[:500], seq)
        pause = _pause(machine.lost_in_a_row - FEW_LOST)
        if pause:
            draft.then(lambda: setattr(run, "not_before", self.now() + pause))
        draft.move(run, machine, seq)
        self.follow(draft, run, commands)

    def _deadline(self, draft: Draft, run: Run, attempt: int) -> None:
        assert run.parts is not None
        machine, seq = draft.machine(run)
        machine, commands = run.parts.coordinator.step(machine, Deadline(attempt))
        draft.move(run, machine, seq)
        self.follow(draft, run, commands)

    def follow(self, draft: Draft, run: Run, commands: list[Command]) -> None:
        """Write down what the machine wants; makers and clients find it in its state."""
        machine, seq = draft.machine(run)
        if machine.phase is not Phase.COLLECTING:  # what has happened so far is in it
            draft.book.set_run(run.name, machine=json.dumps(machine.to_plain()), seq=seq)
            draft.then(self.clerk.nudge)
        for command in commands:
            match command:
                case Commit() if run.parts is not None and not run.parts.coordinator.policy.overlaps_rounds:
                    draft.book.close_asked(run.name)
                case Abandon(attempt, reason):
                    self._abandoned(draft, run, attempt, reason)
                case Finish(reason):
                    self._finished(draft, run, reason)
                case _:
                    pass

    def _abandoned(self, draft: Draft, run: Run, attempt: int, reason: Reason) -> None:
        assert run.parts is not None
        machine, _ = draft.machine(run)
        if run.parts.guard is not None:
            run.parts.guard.charge(attempt)
        if not run.parts.coordinator.policy.overlaps_rounds:
            draft.book.close_asked(run.name)
        rows = draft.book.tasks(run.name, attempt)
        self.offences.blame_refusers(draft, run, rows)
        people = told(run.parts.guard, attempt, {"rejected": rejected_of(rows)})
        self._note(draft, run, "abandon", {"attempt": attempt, "why": str(reason), **people})
        pause = _pause(machine.abandoned_in_a_row)
        draft.then(lambda: setattr(run, "not_before", self.now() + pause))
        self._metrics.abandoned(run.name)
        log("abandoned", run=run.name, attempt=attempt, why=str(reason))

    def _finished(self, draft: Draft, run: Run, why: Reason) -> None:
        machine, _ = draft.machine(run)
        rows = draft.book.rows(run.name)
        reason = str(end_reason(why, rows[-1] if rows else None))
        model = hash_of(run.state.params_D) if run.state is not None else ""
        if run.state is not None:
            self._note(draft, run, chain.END, {"reason": reason, "version": machine.version, "model": model})
        draft.book.close_asked(run.name)
        self._set_status(draft, run, reason)
        draft.then(lambda: run.tell(lambda: run.finish(reason)))
        draft.then(lambda: self.wake(set(self.roll.present)))
        log("ended", run=run.name, round=machine.version, why=reason)

    def _make(self, run: Run) -> None:
        """Make a version of what has arrived."""
        started = time.perf_counter()
        machine = run.machine
        with self.store.look() as book:
            attempts = {task.attempt for task in machine.committing}
            rows = [row for attempt in attempts for row in book.tasks(run.name, attempt)]
        secret = None
        if run.parts is not None and run.parts.job.secure is not None:
            secret = Secret(
                self._key, self.roll.keys(), run.post, run.parts.coordinator.policy.deadline or STEP_SECONDS
            )
        made = run.make(machine, {row.task: row for row in rows}, self.now(), secret)
        taken = self.clerk.make(lambda draft: self._made(draft, run, made, rows))
        with self.store.look() as book:
            known = book.run(run.name)
        assert known is not None
        run.drop(machine.committing, known.state)
        if taken and made.row is not None:
            self._metrics.committed(run.name, machine.version + 1, time.perf_counter() - started)

    def _made(self, draft: Draft, run: Run, made: Made, rows: list[TaskRow]) -> bool:
        """Write down what was made; False if somebody has ended the run meanwhile."""
        assert run.parts is not None and run.state is not None
        machine, seq = draft.machine(run)
        if machine.phase is not Phase.COMMITTING:
            return False
        done, attempt, before = machine.committing, machine.attempt, hash_of(run.state.params_D)
        commands: list[Command] = []
        if made.event is not None:
            machine, commands = run.parts.coordinator.step(machine, made.event)
        overflowed = [task for task in done if task.client in made.overflowed]
        left_out = [task for task in done if task not in made.counted and task not in overflowed]
        draft.book.set_stage(run.name, made.counted, Stage.COUNTED)
        draft.book.set_stage(run.name, left_out, Stage.CLOSED)
        if overflowed:
            draft.book.reject(run.name, overflowed, OVERFLOWED)
            attempts = {row.task.attempt for row in rows}
            rows = [row for number in sorted(attempts) for row in draft.book.tasks(run.name, number)]
            for client in made.overflowed:
                log("rejected", run=run.name, client=client, why=f"{OVERFLOWED}: quarantined in this run")
        draft.then(lambda: setattr(run, "state", made.state))
        if made.row is not None:
            draft.book.add_row(run.name, made.row)
            counted = set(made.counted)
            people = {
                "cohort": cohort_of(rows, made.counted, draft.book.clients()),
                "rejected": rejected_of(rows, left_out),
            }
            body = {
                "version": machine.version,
                "attempt": attempt,
                "model": hash_of(made.state.params_D),
                "before": before,
                "rule": run.plan.aggregator.name,
                **told(run.parts.guard, attempt, people),
                "epsilon": made.epsilon,
                "seconds": int(self._wall()),
            }
            self._note(draft, run, "commit", body, made.row)
            draft.then(lambda: run.counted.update({task.client: task.attempt for task in counted}))
            accuracy = made.row.get("test", {}).get("accuracy")
            log("committed", run=run.name, round=machine.version, clients=len(counted), accuracy=accuracy)
        self._measured(draft, run, made.measured)
        if made.reason is not None:
            machine, more = run.parts.coordinator.step(machine, Halt(made.reason))
            commands = commands + more
        draft.move(run, machine, seq)
        draft.book.set_run(run.name, state=made.state_file)
        run_state = run.state
        run.state = made.state  # what follows is told of the new version
        try:
            self.follow(draft, run, commands)
        finally:
            run.state = run_state
        self.offences.forgive(draft, run, [task.client for task in made.counted])
        self.offences.blame(draft, made.overflowed)
        if made.row is not None:
            self.offences.blame_refusers(draft, run, rows)
        return True

    def _note(self, draft: Draft, run: Run, kind: str, body: dict[str, Any], row: dict[str, Any] | None = None) -> None:
        """Add a record to a run's ledger, and a row to its metrics."""
        known = draft.book.run(run.name)
        assert known is not None
        first = kind == chain.START
        line, head = chain.start(body, self._key) if first else chain.add(known.head, kind, body, self._key)
        draft.book.add_line(run.name, line, head)
        draft.then(lambda: run.tell(lambda: run.note(row, line)))

    def _recover(self) -> None:
        """Every second, try whether what could not be written can be now."""
        if self.now() < self._next_try:
            return
        self._next_try = self.now() + 1.0
        if self.why:
            self.clerk.submit(self._try_to_write)
            return
        for run in self.runs.values():
            if run.stale:
                self._write_down(run)

    def _try_to_write(self, draft: Draft) -> None:
        """Find out whether disk and store take something again."""
        probe = self.home / ".room"
        written(probe, self.home / ".room.new", bytes(PROBE))
        probe.unlink()
        draft.book.note_time(self._wall())
        draft.then(lambda: self.trouble(""))

    def _write_down(self, run: Run) -> None:
        """Make the files for people as the store has them."""
        try:
            with self.store.look() as book:
                run.write_down(book.rows(run.name), book.lines(run.name))
        except Exception as error:
            self.clerk.busy(error)

    def trouble(self, why: str) -> None:
        """Say when nothing can be written, and when it can again."""
        if why and not self.why:
            log("read_only", why=why)
        if self.why and not why:
            log("recovered")
        self.why = why
        self._metrics.read_only(bool(why))


def _pause(num_failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(num_failures, 10)) if num_failures > 0 else 0.0
