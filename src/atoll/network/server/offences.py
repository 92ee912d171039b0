"""Offences of clients: refused work, bad updates, versions that overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from atoll.core.messages import Task
from atoll.network.server.auth import Authenticator
from atoll.network.server.logs import log
from atoll.network.server.presence import Presence
from atoll.network.server.runs import Run, WaitingRun
from atoll.network.server.tables import ClientRow, Stage, Status, TaskRow
from atoll.network.server.writer import Transaction

MAX_OFFENCES = 3
"""Offences after which a client is excluded until the operator approves it again."""
REFUSED = "refused: "
"""Prefix of the reason of a task that its client refused."""


class Offences:
    """Counts offences and excludes clients; `fail` records that tasks failed, `wake` ends polls."""

    def __init__(
        self,
        runs: Mapping[str, WaitingRun | Run],
        presence: Presence,
        authenticator: Authenticator,
        fail: Callable[[Transaction, Run, list[Task], str], None],
        wake: Callable[[set[int]], None],
    ) -> None:
        self._runs, self._presence, self._authenticator, self._fail, self._wake = (
            runs,
            presence,
            authenticator,
            fail,
            wake,
        )

    def record_refusal(self, transaction: Transaction, run: Run, task: Task, why: str, *, whole_run: bool) -> None:
        """Record that a client refuses a task: it is not asked for a while, or never again in this run."""
        row = transaction.tables.count_refusal(run.name, task.client, whole_run=whole_run)
        transaction.after_commit(lambda: run.set_refusals([row]))
        self._fail(transaction, run, [task], REFUSED + why)

    def clear_refusals(self, transaction: Transaction, run: Run, counted: Iterable[int]) -> None:
        """Clear the refusals of clients whose updates count now; their offences remain."""
        back = [client for client in counted if client in run.refusals and not run.refusals[client].whole_run]
        for client in back:
            transaction.tables.clear_refusals(client, run.name)
        transaction.after_commit(lambda: run.clear_refusals(back))

    def count_offences(self, transaction: Transaction, numbers: Iterable[int]) -> None:
        """Count an offence of each client; exclude those with too many."""
        wanted = set(numbers)
        for client in [each for each in transaction.tables.clients() if each.number in wanted] if wanted else []:
            if transaction.tables.count_offence(client.id) >= MAX_OFFENCES and client.status is Status.APPROVED:
                log("rejected", client=client.name, why="quarantined after repeated offences")
                self.exclude(transaction, client, Status.QUARANTINED)

    def count_refusal_offences(self, transaction: Transaction, run: Run, rows: Sequence[TaskRow]) -> None:
        """Count an offence of clients that refused a task which others of the same attempt did.

        Where no client did it, such as on a model that has diverged, it was not the clients' fault. Where rounds
        overlap, an attempt may be of one client, whose refusal is no offence.
        """
        done = any(row.stage in (Stage.ARRIVED, Stage.COUNTED) for row in rows)
        if done and not run.parts.coordinator.policy.overlaps_rounds:
            leaves = {row.client for row in transaction.tables.refusals(run.name) if row.whole_run}
            refused = [row.task.client for row in rows if str(row.report.get("why", "")).startswith(REFUSED)]
            self.count_offences(transaction, [client for client in refused if client not in leaves])

    def exclude(self, transaction: Transaction, client: ClientRow, status: Status) -> None:
        """Exclude a client; its tasks are not waited for."""
        epoch = transaction.tables.revoke(client.id, status)
        for run in self._built_runs():
            task = transaction.machine(run)[0].in_flight.get(client.number) if client.number is not None else None
            if task is not None:
                self._fail(transaction, run, [task], f"client {status}")
        transaction.after_commit(lambda: self._authenticator.end_session(client.id, epoch))
        self.refresh_clients(transaction)
        numbers = set() if client.number is None else {client.number}
        transaction.after_commit(lambda: self._wake(numbers))  # a waiting poll is answered now

    def approve(self, transaction: Transaction, clients: Sequence[ClientRow], samples: int | None) -> list[int]:
        """Approve clients, and set the samples to which the operator agreed; their refusals are cleared."""
        numbers = [transaction.tables.approve(client.id) for client in clients]
        if samples is not None:
            for client in clients:
                transaction.tables.set_agreed_samples(client.id, samples)
        for run in self._built_runs():
            transaction.after_commit(partial(run.clear_refusals, numbers))
        self.refresh_clients(transaction)
        return numbers

    def _built_runs(self) -> list[Run]:
        """Return the runs that may have asked clients."""
        return [run for run in list(self._runs.values()) if isinstance(run, Run)]

    def refresh_clients(self, transaction: Transaction) -> None:
        """Reload clients from the store, since approvals have changed."""
        known, agreed = transaction.tables.clients(), transaction.tables.agreed_samples()
        transaction.after_commit(lambda: self._presence.set_clients(known, agreed))
        transaction.after_commit(self._authenticator.clear_cache)
