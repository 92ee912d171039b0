"""The driver of all runs: builds those whose clients are there, asks clients, closes attempts and commits versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.coordinator import Finish, Phase
from atoll.core.errors import AtollError
from atoll.network.protocol.blobs import MakeBlobs, write_file
from atoll.network.server.auth import Authenticator, Clock, Refused
from atoll.network.server.journal import Journal
from atoll.network.server.monitoring import Metrics, log
from atoll.network.server.presence import Presence, concerned, why_rows_differ, why_waiting
from atoll.network.server.restoring import restore_run
from atoll.network.server.run_logs import log_capped, log_unmeasured
from atoll.network.server.runs import RUNNING, Run, WaitingRun, built_runs
from atoll.network.server.secret_evaluation import add_in_secret, log_sum, record_sum, why_too_few
from atoll.network.server.secure_session import STEP_SECONDS, SecureContext
from atoll.network.server.sessions import hold_sessions, with_session
from atoll.network.server.sites import LAST_SECONDS, SecretSum, summary
from atoll.network.server.store import Store
from atoll.network.server.writer import Transaction, Writer

PROBE = 1 << 16
"""Bytes for which there must be room before writing is tried again."""
MAX_SESSION_RUNS = 16
"""Runs whose clients hold sessions of split learning at a time: each has a thread for as long as a round takes."""
AnyRun = TypeVar("AnyRun", WaitingRun, Run)


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
        self._wall, self._key, self._metrics, self._wanted = clock.wall, key, metrics, num_clients
        self.wake: Callable[[set[int]], None] = lambda numbers: None
        self.runs: dict[str, WaitingRun | Run] = {}
        self.read_only_reason = ""
        """Why nothing can be written, if so."""
        self._next_try = 0.0
        """When to try again whether something can be written."""
        self._stopping = False
        self.writer = Writer(store, self._tick, self.set_read_only)
        torch.set_num_threads(1)  # as in a simulation, and before there are workers: each keeps what it begins with
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="commit")
        self._sessions = ThreadPoolExecutor(max_workers=MAX_SESSION_RUNS, thread_name_prefix="sessions")
        with store.read() as tables:
            self.presence = Presence(tables.clients(), self.now)
            self.presence.set_clients(tables.clients(), tables.agreed_samples())
            for row in tables.runs():
                run = self.runs[row.id] = restore_run(tables, row, home, make_blobs, self.notify)
                if isinstance(run, Run):
                    run.began = self.now()  # how long no server was running is not known: the deadline begins anew
                metrics.at_round(row.id, run.machine.version if isinstance(run, Run) else 0)
        self.journal = Journal(
            self.runs, self.presence, key, metrics, clock, authenticator, self.notify, self.writer.wake
        )

    def notify(self, numbers: set[int]) -> None:
        """Wake the polls of clients for whom there is news."""
        self.wake(numbers)

    def built_runs(self) -> list[Run]:
        """Return the runs whose plan is built."""
        return built_runs(self.runs)

    def close(self) -> None:
        """Finish what the workers do, write everything, and close all files."""
        self._stopping = True
        for run in self.built_runs():
            run.mailbox.close()
            run.sites.mailbox.close()
            if run.streams is not None:
                run.streams.close_all()
        self._sessions.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.writer.stop()
        self.store.close()
        for each in self.runs.values():
            each.files.close()

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
                if isinstance(run, Run):
                    self._continue(run)
                elif self._has_clients(run):
                    self._start_work(run, self._build)

    def _has_clients(self, run: WaitingRun) -> bool:
        """Return whether enough clients are approved, and all have said how many samples they have."""
        known = concerned(run.plan, self.presence.clients)
        if len(self.presence.clients) < self._wanted or len(known) < run.min_clients:
            return False
        why = why_rows_differ(run.plan, known)
        self._log_waiting(run, why)
        return not why and all(client.num_samples for client in known.values())

    def _build(self, waiting: WaitingRun) -> None:
        """Build a run for the clients that are there; the built run takes the place of the waiting one."""
        with self.writer.lock:
            sizes, capped = self.presence.sizes(waiting.plan), self.presence.capped_samples()
        log_capped(waiting, capped)
        run = waiting.build(sizes)
        log_unmeasured(run)

        def replace(transaction: Transaction) -> None:
            row = transaction.tables.run(run.name)
            if row is not None and row.status == RUNNING:  # not stopped meanwhile, nor earlier in this transaction
                self.runs[run.name] = run  # at once: the store has nothing of it yet

        self.writer.write(replace)

    def _continue(self, run: Run) -> None:
        """Start what is due in a run."""
        if self._sum_to_add(run) is not None:
            self._start_work(run, self._add_in_secret)
        elif self._evaluation_to_close(run) is not None:
            self._start_work(run, self._close_evaluation)
        elif run.machine.phase is Phase.READY and self._can_begin(run):
            self._start_work(run, self._begin)
        elif run.machine.phase is Phase.COMMITTING:
            self._start_work(run, self._commit_version)
        elif run.machine.phase is Phase.COLLECTING and self._is_late(run):
            run.busy = True
            closed = self.writer.submit(partial(self.journal.deadline, run=run, attempt=run.machine.attempt))
            closed.add_done_callback(lambda done: setattr(run, "busy", False))

    def _can_begin(self, run: Run) -> bool:
        policy, machine = run.parts.coordinator.policy, run.machine
        if run.halting is not None or machine.version >= run.parts.coordinator.rounds:
            return not run.sites.answers.keys() >= {machine.version}  # no client is needed for the end, but to evaluate
        if machine.in_flight or len(machine.arrived) >= policy.goal(run.parts.coordinator.num_clients):
            return True  # clients are working, or enough have delivered
        waiting = {task.client for task in machine.arrived}
        may = self.presence.may_be_asked(run)
        least = 1 if policy.overlaps_rounds else max(1, policy.min_reports)
        candidates = concerned(run.plan, self.presence.clients)
        can = sum(may(client) and client not in waiting for client in candidates) >= least
        self._log_waiting(run, "" if can else why_waiting(run, self.presence, least))
        return can

    def _log_waiting(self, run: WaitingRun | Run, why: str) -> None:
        """Log once why a run waits for clients."""
        if why and run.waits_for != why:
            log("waiting", run=run.name, why=why)
        run.waits_for = why

    def _is_late(self, run: Run) -> bool:
        deadline = run.parts.coordinator.policy.deadline
        return deadline is not None and self.now() > run.began + deadline

    def _start_work(self, run: AnyRun, work: Callable[[AnyRun], None]) -> None:
        """Let a worker thread work on a run."""
        run.busy = True
        talks = isinstance(run, Run) and run.streams is not None and work == self._commit_version
        (self._sessions if talks else self._workers).submit(self._work_safely, run, work)

    def _work_safely(self, run: AnyRun, work: Callable[[AnyRun], None]) -> None:
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

    def _begin(self, run: Run) -> None:
        """Ask clients, once what they are to be sent is prepared."""
        with self.writer.lock:
            sizes, capped = self.presence.sizes(run.plan, run.sizes), self.presence.capped_samples(run.sizes)
        if sizes != run.sizes and run.plan.privacy is None:
            log_capped(run, capped)
            run.rebuild(sizes)
        machine = run.machine
        if machine.phase is not Phase.READY:
            return
        _, commands = run.parts.coordinator.step(machine, self.journal.opening(run, machine))
        ends = any(isinstance(command, Finish) for command in commands)  # then nothing is sent
        if run.plan.evaluation.clients_every and run.sites.is_due(machine.version, last=ends):
            prepared = run.prepare_broadcast(machine)
            run.prepare_sites()
            self.writer.write(lambda transaction: self.journal.open_evaluation(transaction, run, prepared))
        if ends and machine.version in run.sites.answers:
            return  # clients measure the last version
        changed = "" if ends else run.prepare_broadcast(machine)
        measured = run.measure_last() if ends else ()
        self.writer.write(lambda transaction: self.journal.record_asked(transaction, run, changed, measured))

    def _sum_to_add(self, run: Run) -> int | None:
        """Return a version that clients are to add up in secret now.

        A client that trains answers no message, and its sum would be lost: unless rounds overlap, it is waited for.
        """
        sites, policy, machine = run.sites, run.parts.coordinator.policy, run.machine
        if not sites.answers:
            return None
        next_open = machine.version if sites.is_due(machine.version, last=False) else sites.newest
        seconds = policy.deadline or LAST_SECONDS
        version = sites.next_to_add(self.presence.secret_evaluators(run), self.now(), seconds, next_open)
        if version is None or policy.overlaps_rounds or machine.in_flight.keys().isdisjoint(sites.ready(version)):
            return version
        return None

    def _add_in_secret(self, run: Run) -> None:
        """Let clients add up what they measured of a version; training goes on when they have."""
        with self.writer.lock:
            version = self._sum_to_add(run)
            if version is None:
                return
            known = self.presence.clients.keys() - set(run.state.quarantined)
            clients = tuple(client for client in run.sites.ready(version) if client in known)
            most = {client: self.presence.stated_samples(client) for client in clients}
            names = self.presence.names()
        record = partial(record_sum, run=run, version=version, offences=self.journal.offences)
        too_few = why_too_few(len(clients))
        added = SecretSum(clients, reason=too_few) if too_few else SecretSum(clients)
        self.writer.write(partial(record, added=added))
        if not too_few:
            seconds = run.parts.coordinator.policy.deadline or STEP_SECONDS
            context = SecureContext(self._key, self.presence.keys(), run.sites.mailbox, seconds)
            added = add_in_secret(run, version, clients, context, most)
            if not self._stopping:  # else it was cut off, as the record says
                self.writer.write(partial(record, added=added))
            for _ in added.rejected:
                self._metrics.rejected("bad evaluation")
        log_sum(run, version, added, names)

    def _evaluation_to_close(self, run: Run) -> int | None:
        """Return a version of which all clients have told that are there, or whose time is over."""
        if not run.sites.answers:
            return None
        seconds = run.parts.coordinator.policy.deadline or LAST_SECONDS
        return run.sites.next_to_close(self.presence.evaluators(run), self.now(), seconds)

    def _close_evaluation(self, run: Run) -> None:
        """Make figures of what clients measured of a version."""
        with self.writer.lock:
            version = self._evaluation_to_close(run)
            if version is None:
                return
            answers, added = dict(run.sites.answers[version]), run.sites.secret_sums.get(version)
            names = self.presence.names()
        result = summary(version, answers, names, run.sites.layout, run.parts.job.measures, added)
        self.writer.write(lambda transaction: self.journal.close_evaluation(transaction, run, version, result))

    def _commit_version(self, run: Run) -> None:
        """Commit a version from what has arrived."""
        started = time.perf_counter()
        machine = run.machine
        with self.store.read() as tables:
            attempts = {task.attempt for task in machine.committing}
            rows = [row for attempt in attempts for row in tables.tasks(run.name, attempt)]
        secret = None
        if run.parts.job.secure is not None:
            secret = SecureContext(
                self._key, self.presence.keys(), run.mailbox, run.parts.coordinator.policy.deadline or STEP_SECONDS
            )
        by_task = {row.task: row for row in rows}
        held = None if run.streams is None else hold_sessions(run, by_task, self.presence, lambda: self._stopping)
        result = run.commit(machine, by_task, self.now(), secret, held)
        rows = rows if held is None else [with_session(row, held) for row in rows]

        def record(transaction: Transaction) -> bool:
            written = self.journal.record_commit(transaction, run, result, rows)
            if held is not None and written:
                self.journal.offences.count_offences(transaction, held.offenders)
            return written

        taken = self.writer.write(record)
        with self.store.read() as tables:
            row = tables.run(run.name)
        if row is not None:
            run.drop_tasks(machine.committing, row.state)
        if taken and result.outcome.row is not None:
            self._metrics.committed(run.name, machine.version + 1, time.perf_counter() - started)

    def _recover(self) -> None:
        """Retry every second what could not be written."""
        if self.now() < self._next_try:
            return
        self._next_try = self.now() + 1.0
        if self.read_only_reason:
            self.writer.submit(self._try_to_write)
            return
        for run in self.built_runs():
            if run.files.stale:
                self._rewrite_files(run)

    def _try_to_write(self, transaction: Transaction) -> None:
        """Check whether disk and store can be written to again."""
        probe = self.home / ".room"
        write_file(probe, self.home / ".room.new", bytes(PROBE))
        probe.unlink()
        transaction.tables.probe_write(self._wall())
        transaction.after_commit(lambda: self.set_read_only(""))

    def _rewrite_files(self, run: Run) -> None:
        """Write the files for people as the store has them."""
        try:
            with self.store.read() as tables:
                run.rewrite_files(tables.metrics_rows(run.name), tables.ledger_lines(run.name))
        except Exception as error:
            self.writer.as_unavailable(error)

    def set_read_only(self, why: str) -> None:
        """Set why nothing can be written, or "", and log the change."""
        if why and not self.read_only_reason:
            log("read_only", why=why)
        if self.read_only_reason and not why:
            log("recovered")
        self.read_only_reason = why
        self._metrics.read_only(bool(why))
