"""Offences: what comes of clients that refuse work, send bad updates, or make a version overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from atoll.core.messages import Task
from atoll.network.server.auth import Gate
from atoll.network.server.logs import log
from atoll.network.server.presence import Roll
from atoll.network.server.runs import Run
from atoll.network.server.tables import ClientRow, Stage, Status, TaskRow
from atoll.network.server.writer import Draft

MAX_OFFENCES = 3
"""After so many bad updates and refusals a client is shut out until the operator approves it again."""
REFUSED = "refused: "
"""What the reason of a task begins with that the client would not do."""


class Offences:
    """Counts offences and shuts clients out; `fail` writes down that nothing will come of tasks, `wake` ends polls."""

    def __init__(
        self,
        runs: Mapping[str, Run],
        roll: Roll,
        gate: Gate,
        fail: Callable[[Draft, Run, list[Task], str], None],
        wake: Callable[[set[int]], None],
    ) -> None:
        self._runs, self._roll, self._gate, self._fail, self._wake = runs, roll, gate, fail, wake

    def refuse(self, draft: Draft, run: Run, task: Task, why: str, *, whole_run: bool) -> None:
        """Write down that a client will not do a task: it is not asked for a while, or in the whole run."""
        row = draft.book.refuse(run.name, task.client, whole_run=whole_run)
        draft.then(lambda: run.note_refusals([row]))
        self._fail(draft, run, [task], REFUSED + why)

    def forgive(self, draft: Draft, run: Run, counted: Iterable[int]) -> None:
        """Forget how often clients refused whose updates count now; their offences stay."""
        back = [client for client in counted if client in run.refusals and not run.refusals[client].whole_run]
        for client in back:
            draft.book.forgive(client, run.name)
        draft.then(lambda: run.forgive(back))

    def blame(self, draft: Draft, numbers: Iterable[int]) -> None:
        """Count an offence of each of these clients; who has too many is shut out."""
        wanted = set(numbers)
        for client in [each for each in draft.book.clients() if each.number in wanted] if wanted else []:
            if draft.book.blame(client.id) >= MAX_OFFENCES and client.status is Status.APPROVED:
                log("rejected", client=client.name, why="quarantined after repeated offences")
                self.shut_out(draft, client, Status.QUARANTINED)

    def blame_refusers(self, draft: Draft, run: Run, rows: Sequence[TaskRow]) -> None:
        """Blame those who refused what others of the same attempt could do.

        Where nobody could do it, such as train on a model that has diverged, it was not the clients' fault. Where
        rounds overlap an attempt may be one client's, which pauses and is not blamed.
        """
        assert run.parts is not None
        done = any(row.stage in (Stage.ARRIVED, Stage.COUNTED) for row in rows)
        if done and not run.parts.coordinator.policy.overlaps_rounds:
            leaves = {row.client for row in draft.book.refusals(run.name) if row.whole_run}
            refused = [row.task.client for row in rows if str(row.report.get("why", "")).startswith(REFUSED)]
            self.blame(draft, [client for client in refused if client not in leaves])

    def shut_out(self, draft: Draft, client: ClientRow, status: Status) -> None:
        """Shut a client out; what it was asked is not waited for."""
        epoch = draft.book.revoke(client.id, status)
        for run in self._runs.values():
            task = draft.machine(run)[0].in_flight.get(client.number) if client.number is not None else None
            if task is not None:
                self._fail(draft, run, [task], f"client {status}")
        draft.then(lambda: self._gate.end(client.id, epoch))
        self.know_clients(draft)
        numbers = set() if client.number is None else {client.number}
        draft.then(lambda: self._wake(numbers))  # who waits is told now

    def let_in(self, draft: Draft, clients: Sequence[ClientRow], samples: int | None) -> list[int]:
        """Let clients in that have so many samples each, where that is known; what they refused is forgiven."""
        numbers = [draft.book.approve(client.id) for client in clients]
        if samples is not None:
            for client in clients:
                draft.book.agree(client.id, samples)
        for run in self._runs.values():
            draft.then(lambda run=run: run.forgive(numbers))  # type: ignore[misc]
        self.know_clients(draft)
        return numbers

    def know_clients(self, draft: Draft) -> None:
        """Look clients up again: somebody was let in or shut out."""
        known, agreed = draft.book.clients(), draft.book.agreed()
        draft.then(lambda: self._roll.know(known, agreed))
        draft.then(self._gate.forget)
