"""Reads and writes of the store's tables within one transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, select, text, update

from atoll.core.errors import RunError
from atoll.core.messages import Task
from atoll.ledger.chain import EMPTY, Head
from atoll.network.server.tables import (
    ClientRow,
    RefusalRow,
    RunRow,
    Stage,
    Status,
    TaskRow,
    agreed_table,
    all_tables,
    clients_table,
    evaluations_table,
    is_task,
    ledger_table,
    meta_table,
    readiness_table,
    refusals_table,
    rounds_table,
    runs_table,
    tasks_table,
    tokens_table,
)

UPDATE_OUTCOMES = (
    update(tasks_table)
    .where(*is_task(bindparam("of_run"), bindparam("of_attempt"), bindparam("of_client")))
    .values({name: bindparam(name) for name in ("stage", "update", "report", "signature", "seq")})
)


class Tables:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outcomes: list[dict[str, object]] = []

    @property
    def _db(self) -> Connection:
        """Return the connection, after outcomes of tasks were written to it."""
        self.flush()
        return self._connection

    def flush(self) -> None:
        """Write outcomes of tasks in one statement, as there may be many."""
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._connection.execute(UPDATE_OUTCOMES, outcomes)

    def meta(self, key: str) -> str | None:
        """Return a property of the store."""
        value: str | None = self._db.execute(select(meta_table.c.value).where(meta_table.c.key == key)).scalar()
        return value

    def set_meta(self, key: str, value: str) -> None:
        """Set a property of the store."""
        self._db.execute(delete(meta_table).where(meta_table.c.key == key))
        self._db.execute(insert(meta_table).values(key=key, value=value))

    def wait_for_other_transactions(self) -> None:
        """Wait until concurrent transactions end: one of a killed server may still be committing."""
        names = ", ".join(table.name for table in all_tables.sorted_tables)
        self._db.execute(text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))

    def probe_write(self, now: float) -> None:
        """Write a value, to find out whether writing works."""
        self.set_meta("written", str(now))

    def add_token(self, hashed: str, expires: float) -> None:
        """Add a token with which a client can enrol once."""
        self._db.execute(insert(tokens_table).values(hash=hashed, expires=expires, used_by=None))

    def has_token(self, hashed: str) -> bool:
        """Return whether a token exists, used or not."""
        return self._db.execute(select(tokens_table.c.hash).where(tokens_table.c.hash == hashed)).first() is not None

    def use_token(self, hashed: str, client: str, now: float) -> bool:
        """Use a token; return False if it does not exist, has expired, or was used by another client."""
        row = self._db.execute(select(tokens_table).where(tokens_table.c.hash == hashed)).one_or_none()
        if row is None or row.used_by not in (None, client) or (row.used_by is None and row.expires < now):
            return False
        self._db.execute(update(tokens_table).where(tokens_table.c.hash == hashed).values(used_by=client))
        return True

    def add_client(self, id: str, name: str, key: bytes) -> None:
        """Add a client, which is denied until it is approved."""
        self._db.execute(
            insert(clients_table).values(
                id=id, name=name, key=key, status=Status.PENDING, number=None, epoch=0, offences=0, num_samples=0
            )
        )

    def client(self, id: str) -> ClientRow | None:
        """Return a client by its id; None if it does not exist."""
        row = self._db.execute(select(clients_table).where(clients_table.c.id == id)).one_or_none()
        return None if row is None else _client_of(row)

    def clients(self) -> list[ClientRow]:
        """Return all clients, ordered by name."""
        return [_client_of(row) for row in self._db.execute(select(clients_table).order_by(clients_table.c.name))]

    def approve(self, id: str) -> int:
        """Approve a client; return its number, the next one if it has none. Its refusals are cleared."""
        known = self.client(id)
        if known is None:
            raise RunError(f"there is no client {id}: see atoll clients list")
        number = known.number
        if number is None:
            largest = self._db.execute(select(func.max(clients_table.c.number))).scalar()
            number = 0 if largest is None else largest + 1
        self._set_client(id, status=Status.APPROVED, number=number, offences=0)
        self.clear_refusals(number)
        return number

    def set_agreed_samples(self, id: str, num_samples: int) -> None:
        """Set how many samples the operator agreed to."""
        self._db.execute(delete(agreed_table).where(agreed_table.c.client == id))
        self._db.execute(insert(agreed_table).values(client=id, num_samples=num_samples))

    def agreed_samples(self) -> dict[str, int]:
        """Return how many samples the operator agreed to, by client id."""
        return {row.client: row.num_samples for row in self._db.execute(select(agreed_table))}

    def count_refusal(self, run: str, client: int, *, whole_run: bool) -> RefusalRow:
        """Count a refusal of a client in a run; return all of them."""
        where = (refusals_table.c.run == run, refusals_table.c.client == client)
        known = self._db.execute(select(refusals_table).where(*where)).one_or_none()
        times, whole_run = (1, whole_run) if known is None else (known.times + 1, known.whole_run or whole_run)
        self._db.execute(delete(refusals_table).where(*where))
        self._db.execute(insert(refusals_table).values(run=run, client=client, times=times, whole_run=whole_run))
        return RefusalRow(client, times, whole_run)

    def clear_refusals(self, client: int, run: str | None = None) -> None:
        """Clear the refusals of a client in one run, or in all."""
        where = [refusals_table.c.client == client, *([refusals_table.c.run == run] if run is not None else [])]
        self._db.execute(delete(refusals_table).where(*where))

    def refusals(self, run: str) -> list[RefusalRow]:
        """Return the refusals of each client in a run."""
        rows = self._db.execute(select(refusals_table).where(refusals_table.c.run == run))
        return [RefusalRow(row.client, row.times, row.whole_run) for row in rows]

    def revoke(self, id: str, status: Status = Status.REVOKED) -> int:
        """Revoke a client; return the epoch up to which its sessions have ended."""
        known = self.client(id)
        if known is None:
            raise RunError(f"there is no client {id}: see atoll clients list")
        self._set_client(id, status=status, epoch=known.epoch + 1)
        return known.epoch + 1

    def begin_session(self, id: str) -> int:
        """Begin a session of a client, which ends the one before; return its epoch."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, epoch=known.epoch + 1)
        return known.epoch + 1

    def count_offence(self, id: str) -> int:
        """Count an offence of a client; return how many it has."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, offences=known.offences + 1)
        return known.offences + 1

    def set_samples(self, id: str, num_samples: int) -> None:
        """Set how many samples a client states."""
        self._set_client(id, num_samples=num_samples)

    def _set_client(self, id: str, **values: object) -> None:
        self._db.execute(update(clients_table).where(clients_table.c.id == id).values(**values))

    def add_run(self, id: str, plan: str, machine: str) -> None:
        """Add a run."""
        self._db.execute(
            insert(runs_table).values(
                id=id,
                plan=plan,
                status="running",
                machine=machine,
                seq=0,
                state="",
                sizes="[]",
                began=0.0,
                head_length=EMPTY.length,
                head_hash=EMPTY.hash,
            )
        )

    def run(self, id: str) -> RunRow | None:
        """Return a run by its name; None if it does not exist."""
        row = self._db.execute(select(runs_table).where(runs_table.c.id == id)).one_or_none()
        return None if row is None else _run_of(row)

    def runs(self) -> list[RunRow]:
        """Return all runs, ordered by name."""
        return [_run_of(row) for row in self._db.execute(select(runs_table).order_by(runs_table.c.id))]

    def set_run(self, id: str, **values: object) -> None:
        """Change `status`, `machine`, `seq`, `state`, `sizes` (as JSON) or `began` of a run."""
        self._db.execute(update(runs_table).where(runs_table.c.id == id).values(**values))

    def add_ledger_line(self, run: str, line: str, head: Head) -> None:
        """Append a line to a run's ledger; `head` is the head after it."""
        self._db.execute(insert(ledger_table).values(run=run, number=head.length - 1, line=line))
        self.set_run(run, head_length=head.length, head_hash=head.hash)

    def ledger_lines(self, run: str, start: int = 0, most: int | None = None) -> list[str]:
        """Return lines of a run's ledger from a number on, at most `most`."""
        wanted = select(ledger_table.c.line).where(ledger_table.c.run == run, ledger_table.c.number >= start)
        return list(self._db.execute(wanted.order_by(ledger_table.c.number).limit(most)).scalars())

    def last_ledger_line(self, run: str) -> str | None:
        """Return the last line of a ledger; None if it is empty."""
        wanted = select(ledger_table.c.line).where(ledger_table.c.run == run)
        line: str | None = self._db.execute(wanted.order_by(ledger_table.c.number.desc()).limit(1)).scalar()
        return line

    def add_tasks(self, run: str, tasks: Sequence[Task]) -> None:
        """Add tasks, each with its place among them."""
        if tasks:
            rest = {"stage": Stage.ASKED, "update": "", "signature": b"", "seq": 0}
            names = ("attempt", "client", "version", "share", "work")
            rows = [
                {"run": run, **{name: getattr(task, name) for name in names}, **rest, "report": f'{{"place":{place}}}'}
                for place, task in enumerate(tasks)
            ]
            self._db.execute(insert(tasks_table), rows)

    def task(self, run: str, attempt: int, client: int) -> TaskRow | None:
        """Return a task; None if it does not exist."""
        row = self._db.execute(select(tasks_table).where(*is_task(run, attempt, client))).one_or_none()
        return None if row is None else _task_of(row)

    def tasks(self, run: str, attempt: int) -> list[TaskRow]:
        """Return the tasks of an attempt, ordered by client."""
        wanted = (
            select(tasks_table)
            .where(tasks_table.c.run == run, tasks_table.c.attempt == attempt)
            .order_by(tasks_table.c.client)
        )
        return [_task_of(row) for row in self._db.execute(wanted)]

    def set_arrived(
        self, run: str, task: Task, update_: str, report: Mapping[str, Any], signature: bytes, seq: int
    ) -> None:
        """Record that the update of a task arrived, as the event of this number."""
        self._add_outcome(run, task, Stage.ARRIVED, update_, report, signature, seq)

    def set_failed(self, run: str, task: Task, why: str, seq: int) -> None:
        """Record that a task failed, as the event of this number."""
        self._add_outcome(run, task, Stage.FAILED, "", {"why": why}, b"", seq)

    def task_events(self, run: str, after: int) -> list[TaskRow]:
        """Return the outcomes of a run's tasks after an event, in order."""
        wanted = (
            select(tasks_table).where(tasks_table.c.run == run, tasks_table.c.seq > after).order_by(tasks_table.c.seq)
        )
        return [_task_of(row) for row in self._db.execute(wanted)]

    def close_open_tasks(self, run: str) -> None:
        """Close tasks whose updates have not arrived."""
        still = (tasks_table.c.run == run, tasks_table.c.stage == Stage.ASKED)
        self._db.execute(update(tasks_table).where(*still).values(stage=Stage.CLOSED))

    def _add_outcome(
        self, run: str, task: Task, stage: Stage, name: str, report: Mapping[str, Any], signature: bytes, seq: int
    ) -> None:
        which = {"of_run": run, "of_attempt": task.attempt, "of_client": task.client}
        encoded = msgspec.json.encode(report)
        what = {"stage": stage, "update": name, "report": encoded.decode(), "signature": signature, "seq": seq}
        self._outcomes.append(which | what)

    def set_stage(self, run: str, tasks: Sequence[Task], stage: Stage) -> None:
        """Set the stage of tasks."""
        for attempt in {task.attempt for task in tasks}:
            clients = [task.client for task in tasks if task.attempt == attempt]
            where = (tasks_table.c.run == run, tasks_table.c.attempt == attempt, tasks_table.c.client.in_(clients))
            self._db.execute(update(tasks_table).where(*where).values(stage=stage))

    def reject_tasks(self, run: str, tasks: Sequence[Task], why: str) -> None:
        """Mark tasks whose updates arrived as failed."""
        for task in tasks:
            values = {"stage": Stage.FAILED, "report": msgspec.json.encode({"why": why}).decode()}
            where = is_task(run, task.attempt, task.client)
            self._db.execute(update(tasks_table).where(*where).values(**values))

    def last_counted(self, run: str) -> dict[int, int]:
        """Return the newest attempt in which the update of each client counted."""
        wanted = select(tasks_table.c.client, func.max(tasks_table.c.attempt)).where(
            tasks_table.c.run == run, tasks_table.c.stage == Stage.COUNTED
        )
        return {row[0]: row[1] for row in self._db.execute(wanted.group_by(tasks_table.c.client))}

    def add_metrics_row(self, run: str, row: Mapping[str, Any]) -> None:
        """Set the metrics row of a round."""
        where = (rounds_table.c.run == run, rounds_table.c.number == row["round"])
        self._db.execute(delete(rounds_table).where(*where))
        self._db.execute(insert(rounds_table).values(run=run, number=row["round"], row=json.dumps(row)))

    def metrics_rows(self, run: str) -> list[dict[str, Any]]:
        """Return the metrics rows of a run."""
        wanted = select(rounds_table.c.row).where(rounds_table.c.run == run).order_by(rounds_table.c.number)
        return [json.loads(row) for row in self._db.execute(wanted).scalars()]

    def add_evaluation(self, run: str, version: int, client: int, answer: str) -> bool:
        """Add a client's answer about a version; return False if there is one already."""
        table = evaluations_table
        where = (table.c.run == run, table.c.version == version, table.c.client == client)
        if self._db.execute(select(table.c.client).where(*where)).first() is not None:
            return False
        self._db.execute(insert(table).values(run=run, version=version, client=client, answer=answer))
        return True

    def set_evaluation(self, run: str, version: int, client: int, answer: str) -> None:
        """Set an answer about a version, in place of one before."""
        table = evaluations_table
        where = (table.c.run == run, table.c.version == version, table.c.client == client)
        self._db.execute(delete(table).where(*where))
        self._db.execute(insert(table).values(run=run, version=version, client=client, answer=answer))

    def evaluations(self, run: str) -> dict[int, dict[int, str]]:
        """Return the clients' answers about versions that are kept: version -> client -> answer."""
        wanted = select(evaluations_table).where(evaluations_table.c.run == run).order_by(evaluations_table.c.client)
        answers: dict[int, dict[int, str]] = {}
        for row in self._db.execute(wanted):
            answers.setdefault(row.version, {})[row.client] = row.answer
        return answers

    def drop_evaluations(self, run: str, before: int) -> None:
        """Delete the answers about versions before one."""
        table = evaluations_table
        self._db.execute(delete(table).where(table.c.run == run, table.c.version < before))

    def set_readiness(self, run: str, client: str, answer: str) -> None:
        """Set the result of a client's preflight."""
        table = readiness_table
        self._db.execute(delete(table).where(table.c.run == run, table.c.client == client))
        self._db.execute(insert(table).values(run=run, client=client, answer=answer))

    def readiness(self) -> dict[str, dict[str, str]]:
        """Return the results of preflights: client id -> run -> answer."""
        answers: dict[str, dict[str, str]] = {}
        for row in self._db.execute(select(readiness_table)):
            answers.setdefault(row.client, {})[row.run] = row.answer
        return answers


def _client_of(row: Any) -> ClientRow:
    """Convert a row of the clients table."""
    return ClientRow(
        id=row.id,
        name=row.name,
        key=bytes(row.key),
        status=Status(row.status),
        number=row.number,
        epoch=row.epoch,
        offences=row.offences,
        num_samples=row.num_samples,
    )


def _run_of(row: Any) -> RunRow:
    """Convert a row of the runs table."""
    return RunRow(
        id=row.id,
        plan=row.plan,
        status=row.status,
        machine=row.machine,
        seq=row.seq,
        state=row.state,
        sizes=tuple(json.loads(row.sizes)),
        began=row.began,
        head=Head(row.head_length, row.head_hash),
    )


def _task_of(row: Any) -> TaskRow:
    """Convert a row of the tasks table."""
    return TaskRow(
        task=Task(client=row.client, version=row.version, attempt=row.attempt, share=row.share, work=row.work),
        stage=Stage(row.stage),
        update=row.update,
        report=msgspec.json.decode(row.report),
        signature=bytes(row.signature),
        seq=row.seq,
    )
