"""What a server must not forget, in SQLite or PostgreSQL: clients, runs, tasks and the ledger's lines.

Every change is one transaction, and transactions follow each other: whatever is killed when, all of one is there or
nothing. Objects are kept elsewhere and are named here; they are on disk before a transaction names them.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    Engine,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.ledger.chain import EMPTY, Head
from atoll.network.protocol.blobs import open_private
from atoll.network.server.claim import Claim, claim_of, taken
from atoll.network.server.tables import (
    ClientRow,
    RefusalRow,
    RunRow,
    Stage,
    Status,
    TaskRow,
    agreed_table,
    all_tables,
    check_layout,
    client_of,
    clients_table,
    is_task,
    ledger_table,
    meta_table,
    refusals_table,
    rounds_table,
    run_of,
    runs_table,
    task_of,
    tasks_table,
    tokens_table,
)

OUTCOME = (
    update(tasks_table)
    .where(*is_task(bindparam("of_run"), bindparam("of_attempt"), bindparam("of_client")))
    .values({name: bindparam(name) for name in ("stage", "update", "report", "signature", "seq")})
)


class StoreTaken(RunError):
    """Another server has this store now: this one must end."""


class Store:
    """A database; make changes with `with store.write() as book`, and look with `with store.read() as book`."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._one_at_a_time = threading.Lock()
        self._claim: Claim | None = None
        self._cut_off = False
        """Whether a connection was lost, and with it perhaps the lock."""
        self._owner = ""
        """What this server has written into a store that it claims; whoever finds something else there must end."""
        try:
            with self._engine.execution_options(writes=True).begin() as connection:
                check_layout(connection, self.name)
        except DBAPIError as error:
            raise RunError(f"the store {self.name} cannot be opened: {error.orig}; check --store") from error

    @property
    def name(self) -> str:
        """Where it is, without a password."""
        return str(self._engine.url)

    def claim(self) -> None:
        """Have the store for oneself as long as the process lives; RunError if another server has it.

        A file has a lock file beside it, a database an advisory lock; the system lets go of both with the process. The
        owner is written down too, and is looked up in every change: a server whose lock was lost, such as with its
        connection, and taken by another, changes nothing any more.
        """
        self._claim = claim_of(self._engine)
        owner = secrets.token_hex(16)
        with self.write() as tables:
            if self._engine.dialect.name == "postgresql":
                tables.wait_for_other_transactions()
            tables.set_meta("owner", owner)
        self._owner = owner

    @contextmanager
    def write(self) -> Iterator[Tables]:
        """One transaction: all of it, or nothing if anything is raised."""
        writing = self._engine.execution_options(writes=True)
        with self._one_at_a_time:
            if self._cut_off and self._claim is not None:
                self._claim.renew()
                self._cut_off = False
            try:
                with writing.begin() as connection:
                    tables = Tables(connection)
                    if self._owner and tables.meta("owner") != self._owner:
                        raise StoreTaken(taken(self._engine))
                    yield tables
                    tables.flush()
            except DBAPIError as error:
                self._cut_off |= error.connection_invalidated
                raise

    @contextmanager
    def read(self) -> Iterator[Tables]:
        """See one moment of the store."""
        with self._engine.connect() as connection:
            yield Tables(connection)

    def close(self) -> None:
        """Give connections back."""
        if self._claim is not None:
            self._claim.close()
        self._engine.dispose()


class Tables:
    """The store within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outcomes: list[dict[str, object]] = []

    @property
    def _db(self) -> Connection:
        """What everything but outcomes of tasks is said to: it knows them by then."""
        self.flush()
        return self._connection

    def flush(self) -> None:
        """Write down what came of tasks: all at once, as there may be many."""
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._connection.execute(OUTCOME, outcomes)

    def meta(self, key: str) -> str | None:
        """What a store says of itself."""
        found: str | None = self._db.execute(select(meta_table.c.value).where(meta_table.c.key == key)).scalar()
        return found

    def set_meta(self, key: str, value: str) -> None:
        """Let a store say something of itself."""
        self._db.execute(delete(meta_table).where(meta_table.c.key == key))
        self._db.execute(insert(meta_table).values(key=key, value=value))

    def wait_for_other_transactions(self) -> None:
        """Let changes end that are under way: a server that was killed may have asked for one to be made for good."""
        names = ", ".join(table.name for table in all_tables.sorted_tables)
        self._db.execute(text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))

    def probe_write(self, now: float) -> None:
        """Write something, to see whether that is possible."""
        self.set_meta("written", str(now))

    def add_token(self, hashed: str, expires: float) -> None:
        """Let somebody enrol once."""
        self._db.execute(insert(tokens_table).values(hash=hashed, expires=expires, used_by=None))

    def has_token(self, hashed: str) -> bool:
        """Whether there is such a token, whoever may use it."""
        return self._db.execute(select(tokens_table.c.hash).where(tokens_table.c.hash == hashed)).first() is not None

    def use_token(self, hashed: str, client: str, now: float) -> bool:
        """Spend a token; False if there is none, it is too old, or another client spent it."""
        found = self._db.execute(select(tokens_table).where(tokens_table.c.hash == hashed)).one_or_none()
        if found is None or found.used_by not in (None, client) or (found.used_by is None and found.expires < now):
            return False
        self._db.execute(update(tokens_table).where(tokens_table.c.hash == hashed).values(used_by=client))
        return True

    def add_client(self, id: str, name: str, key: bytes) -> None:
        """Write down a client that asks to be let in; it is denied until somebody approves it."""
        self._db.execute(
            insert(clients_table).values(
                id=id, name=name, key=key, status=Status.PENDING, number=None, epoch=0, offences=0, num_samples=0
            )
        )

    def client(self, id: str) -> ClientRow | None:
        """A client by its id."""
        found = self._db.execute(select(clients_table).where(clients_table.c.id == id)).one_or_none()
        return None if found is None else client_of(found)

    def clients(self) -> list[ClientRow]:
        """All clients, in the order of their names."""
        return [client_of(row) for row in self._db.execute(select(clients_table).order_by(clients_table.c.name))]

    def approve(self, id: str) -> int:
        """Let a client in and give it the next number, or the one that it had; what it refused is forgiven."""
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
        """Write down how many samples the operator agreed to."""
        self._db.execute(delete(agreed_table).where(agreed_table.c.client == id))
        self._db.execute(insert(agreed_table).values(client=id, num_samples=num_samples))

    def agreed_samples(self) -> dict[str, int]:
        """How many samples the operator has agreed to, by client id."""
        return {row.client: row.num_samples for row in self._db.execute(select(agreed_table))}

    def count_refusal(self, run: str, client: int, *, whole_run: bool) -> RefusalRow:
        """Count that a client refused work for a run; what is known of it now."""
        where = (refusals_table.c.run == run, refusals_table.c.client == client)
        known = self._db.execute(select(refusals_table).where(*where)).one_or_none()
        times, whole_run = (1, whole_run) if known is None else (known.times + 1, known.whole_run or whole_run)
        self._db.execute(delete(refusals_table).where(*where))
        self._db.execute(insert(refusals_table).values(run=run, client=client, times=times, whole_run=whole_run))
        return RefusalRow(client, times, whole_run)

    def clear_refusals(self, client: int, run: str | None = None) -> None:
        """Forget what a client refused, in one run or in all."""
        where = [refusals_table.c.client == client, *([refusals_table.c.run == run] if run is not None else [])]
        self._db.execute(delete(refusals_table).where(*where))

    def refusals(self, run: str) -> list[RefusalRow]:
        """Who has refused work for a run."""
        found = self._db.execute(select(refusals_table).where(refusals_table.c.run == run))
        return [RefusalRow(row.client, row.times, row.whole_run) for row in found]

    def revoke(self, id: str, status: Status = Status.REVOKED) -> int:
        """Shut a client out, its present session included; the epoch up to which sessions are over."""
        known = self.client(id)
        if known is None:
            raise RunError(f"there is no client {id}: see atoll clients list")
        self._set_client(id, status=status, epoch=known.epoch + 1)
        return known.epoch + 1

    def begin_session(self, id: str) -> int:
        """End a client's session and begin another; its epoch."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, epoch=known.epoch + 1)
        return known.epoch + 1

    def count_offence(self, id: str) -> int:
        """Count an offence; how many there are now."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, offences=known.offences + 1)
        return known.offences + 1

    def set_samples(self, id: str, num_samples: int) -> None:
        """Write down how many samples a client says it has."""
        self._set_client(id, num_samples=num_samples)

    def _set_client(self, id: str, **values: object) -> None:
        self._db.execute(update(clients_table).where(clients_table.c.id == id).values(**values))

    def add_run(self, id: str, plan: str, machine: str) -> None:
        """Begin a run."""
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
        """A run by its name."""
        found = self._db.execute(select(runs_table).where(runs_table.c.id == id)).one_or_none()
        return None if found is None else run_of(found)

    def runs(self) -> list[RunRow]:
        """All runs, in the order of their names."""
        return [run_of(row) for row in self._db.execute(select(runs_table).order_by(runs_table.c.id))]

    def set_run(self, id: str, **values: object) -> None:
        """Change `status`, `machine`, `seq`, `state`, `sizes` (as JSON) or `began` of a run."""
        self._db.execute(update(runs_table).where(runs_table.c.id == id).values(**values))

    def add_ledger_line(self, run: str, line: str, head: Head) -> None:
        """Write a line of a run's ledger; `head` is that after it."""
        self._db.execute(insert(ledger_table).values(run=run, number=head.length - 1, line=line))
        self.set_run(run, head_length=head.length, head_hash=head.hash)

    def ledger_lines(self, run: str, start: int = 0, most: int | None = None) -> list[str]:
        """The lines of a run's ledger from a number on, at most so many."""
        wanted = select(ledger_table.c.line).where(ledger_table.c.run == run, ledger_table.c.number >= start)
        return list(self._db.execute(wanted.order_by(ledger_table.c.number).limit(most)).scalars())

    def add_tasks(self, run: str, tasks: Sequence[Task]) -> None:
        """Write down who is asked."""
        if tasks:
            rest = {"stage": Stage.ASKED, "update": "", "report": "{}", "signature": b"", "seq": 0}
            names = ("attempt", "client", "version", "share", "work")
            rows = [{"run": run, **{name: getattr(task, name) for name in names}, **rest} for task in tasks]
            self._db.execute(insert(tasks_table), rows)

    def task(self, run: str, attempt: int, client: int) -> TaskRow | None:
        """One task."""
        found = self._db.execute(select(tasks_table).where(*is_task(run, attempt, client))).one_or_none()
        return None if found is None else task_of(found)

    def tasks(self, run: str, attempt: int) -> list[TaskRow]:
        """The tasks of an attempt, in the order of their clients."""
        wanted = (
            select(tasks_table)
            .where(tasks_table.c.run == run, tasks_table.c.attempt == attempt)
            .order_by(tasks_table.c.client)
        )
        return [task_of(row) for row in self._db.execute(wanted)]

    def set_arrived(
        self, run: str, task: Task, update_: str, report: Mapping[str, Any], signature: bytes, seq: int
    ) -> None:
        """Write down an update that is here and whole, as the event of this number."""
        self._add_outcome(run, task, Stage.ARRIVED, update_, report, signature, seq)

    def set_failed(self, run: str, task: Task, why: str, seq: int) -> None:
        """Write down that nothing will come of a task, as the event of this number."""
        self._add_outcome(run, task, Stage.FAILED, "", {"why": why}, b"", seq)

    def task_events(self, run: str, after: int) -> list[TaskRow]:
        """What came of a run's tasks after the event of this number, in this order."""
        wanted = (
            select(tasks_table).where(tasks_table.c.run == run, tasks_table.c.seq > after).order_by(tasks_table.c.seq)
        )
        return [task_of(row) for row in self._db.execute(wanted)]

    def close_open_tasks(self, run: str) -> None:
        """Nobody waits any more for what was asked and has not come."""
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
        """Say what became of tasks."""
        for attempt in {task.attempt for task in tasks}:
            clients = [task.client for task in tasks if task.attempt == attempt]
            where = (tasks_table.c.run == run, tasks_table.c.attempt == attempt, tasks_table.c.client.in_(clients))
            self._db.execute(update(tasks_table).where(*where).values(stage=stage))

    def reject_tasks(self, run: str, tasks: Sequence[Task], why: str) -> None:
        """Say of tasks that have arrived that they do not count."""
        for task in tasks:
            values = {"stage": Stage.FAILED, "report": msgspec.json.encode({"why": why}).decode()}
            where = is_task(run, task.attempt, task.client)
            self._db.execute(update(tasks_table).where(*where).values(**values))

    def last_counted(self, run: str) -> dict[int, int]:
        """The newest attempt in which the update of each client counted."""
        wanted = select(tasks_table.c.client, func.max(tasks_table.c.attempt)).where(
            tasks_table.c.run == run, tasks_table.c.stage == Stage.COUNTED
        )
        return {row[0]: row[1] for row in self._db.execute(wanted.group_by(tasks_table.c.client))}

    def add_metrics_row(self, run: str, row: Mapping[str, Any]) -> None:
        """Write down what is known of a round, or more of it."""
        where = (rounds_table.c.run == run, rounds_table.c.number == row["round"])
        self._db.execute(delete(rounds_table).where(*where))
        self._db.execute(insert(rounds_table).values(run=run, number=row["round"], row=json.dumps(row)))

    def metrics_rows(self, run: str) -> list[dict[str, Any]]:
        """What is known of the rounds of a run."""
        wanted = select(rounds_table.c.row).where(rounds_table.c.run == run).order_by(rounds_table.c.number)
        return [json.loads(row) for row in self._db.execute(wanted).scalars()]


def _engine(url: str) -> Engine:
    """Connect; SQLite waits for the disk at every commit, and starts each change with its lock."""
    try:
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    except (ArgumentError, NoSuchModuleError) as error:
        raise PlanError(
            f"--store {url!r} is no address of a database: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":
        path = engine.url.database or ""
        if not path.startswith(":"):
            with suppress(OSError):  # SQLite says what is wrong; its other files have the mode of this one
                os.close(open_private(path, os.O_RDWR | os.O_CREAT))
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def _set_up_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # this module says where transactions begin
    for setting in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 20000"):
        connection.execute(f"PRAGMA {setting}")
