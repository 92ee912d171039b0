"""What a server must not forget, in SQLite or PostgreSQL: clients, runs, tasks and the ledger's lines.

Every change is one transaction, and transactions follow each other: whatever is killed when, all of one is there or
nothing. Objects are kept elsewhere and are named here; they are on disk before a transaction names them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.ledger.chain import Head

SCHEMA = 1


class Status(StrEnum):
    """What the operator thinks of a client."""

    PENDING = "pending"
    APPROVED = "approved"
    REVOKED = "revoked"


class Stage(StrEnum):
    """What became of a task."""

    ASKED = "asked"
    ARRIVED = "arrived"
    COUNTED = "counted"
    REJECTED = "rejected"
    CLOSED = "closed"
    """Nobody waits for it any more."""


class ClientRow(NamedTuple):
    """A client that is, or wants to be, part of the federation."""

    id: str
    name: str
    key: bytes
    status: Status
    number: int | None
    """Its number in plans, once it was approved."""
    epoch: int
    """Its newest session."""
    offences: int


class RunRow(NamedTuple):
    """A run and where it stands."""

    id: str
    plan: str
    status: str
    """running, or why it ended."""
    machine: str
    """The coordinator's state as JSON."""
    state: str
    """The object that holds everything else as of the last commit; "" before there is one."""
    head: Head


class TaskRow(NamedTuple):
    """A task, and what came of it."""

    task: Task
    stage: Stage
    update: str
    """The object that holds the update, or ""."""
    report: Mapping[str, Any]
    signature: bytes
    """The client's, on the update."""


_tables = MetaData()
_meta = Table("meta", _tables, Column("key", String(40), primary_key=True), Column("value", Text, nullable=False))
_clients = Table(
    "clients",
    _tables,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("key", LargeBinary, nullable=False),
    Column("status", String(10), nullable=False),
    Column("number", Integer, unique=True),
    Column("epoch", Integer, nullable=False),
    Column("offences", Integer, nullable=False),
)
_tokens = Table(
    "tokens",
    _tables,
    Column("hash", String(64), primary_key=True),
    Column("expires", Float, nullable=False),
    Column("used_by", String(32)),
)
_runs = Table(
    "runs",
    _tables,
    Column("id", String(64), primary_key=True),
    Column("plan", Text, nullable=False),
    Column("status", String(100), nullable=False),
    Column("machine", Text, nullable=False),
    Column("state", String(64), nullable=False),
    Column("head_length", Integer, nullable=False),
    Column("head_hash", String(64), nullable=False),
)
_tasks = Table(
    "tasks",
    _tables,
    Column("run", String(64), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("client", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("share", Float, nullable=False),
    Column("work", Float, nullable=False),
    Column("stage", String(10), nullable=False),
    Column("update", String(64), nullable=False),
    Column("report", Text, nullable=False),
    Column("signature", LargeBinary, nullable=False),
)
_ledger = Table(
    "ledger",
    _tables,
    Column("run", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("line", Text, nullable=False),
)


class Store:
    """A database; make changes with `with store.change() as book`, and look with `with store.look() as book`."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._one_at_a_time = threading.Lock()
        try:
            _tables.create_all(self._engine)
            with self.change() as book:
                book.check_schema()
        except DBAPIError as error:
            raise RunError(f"the store {self._engine.url!r} cannot be opened: {error.orig}; check --store") from error

    @contextmanager
    def change(self) -> Iterator[Book]:
        """One transaction: all of it, or nothing if anything is raised."""
        writing = self._engine.execution_options(writes=True)
        with self._one_at_a_time, writing.begin() as connection:
            yield Book(connection)

    @contextmanager
    def look(self) -> Iterator[Book]:
        """See one moment of the store."""
        with self._engine.connect() as connection:
            yield Book(connection)

    def close(self) -> None:
        """Give connections back."""
        self._engine.dispose()


class Book:
    """The store within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection

    def check_schema(self) -> None:
        """Remember which layout this store has, and refuse one of another version."""
        found = self._db.execute(select(_meta.c.value).where(_meta.c.key == "schema")).scalar()
        if found is None:
            self._db.execute(insert(_meta).values(key="schema", value=str(SCHEMA)))
        elif found != str(SCHEMA):
            raise RunError(f"this store has layout {found}, this Atoll knows {SCHEMA}: use the Atoll that made it")

    def add_token(self, hashed: str, expires: float) -> None:
        """Let somebody enrol once."""
        self._db.execute(insert(_tokens).values(hash=hashed, expires=expires, used_by=None))

    def use_token(self, hashed: str, client: str, now: float) -> bool:
        """Spend a token; False if there is none, it is too old, or another client spent it."""
        found = self._db.execute(select(_tokens).where(_tokens.c.hash == hashed)).one_or_none()
        if found is None or found.used_by not in (None, client) or (found.used_by is None and found.expires < now):
            return False
        self._db.execute(update(_tokens).where(_tokens.c.hash == hashed).values(used_by=client))
        return True

    def add_client(self, id: str, name: str, key: bytes) -> None:
        """Write down a client that asks to be let in; it is denied until somebody approves it."""
        self._db.execute(
            insert(_clients).values(id=id, name=name, key=key, status=Status.PENDING, number=None, epoch=0, offences=0)
        )

    def client(self, id: str) -> ClientRow | None:
        """A client by its id."""
        found = self._db.execute(select(_clients).where(_clients.c.id == id)).one_or_none()
        return None if found is None else _client(found)

    def clients(self) -> list[ClientRow]:
        """All clients, in the order of their names."""
        return [_client(row) for row in self._db.execute(select(_clients).order_by(_clients.c.name))]

    def approve(self, id: str) -> int:
        """Let a client in and give it the next number, or the one that it had."""
        known = self.client(id)
        if known is None:
            raise RunError(f"there is no client {id}: see atoll clients list")
        number = known.number
        if number is None:
            largest = self._db.execute(select(func.max(_clients.c.number))).scalar()
            number = 0 if largest is None else largest + 1
        self._set_client(id, status=Status.APPROVED, number=number, offences=0)
        return number

    def revoke(self, id: str) -> None:
        """Shut a client out, its present session included."""
        known = self.client(id)
        if known is None:
            raise RunError(f"there is no client {id}: see atoll clients list")
        self._set_client(id, status=Status.REVOKED, epoch=known.epoch + 1)

    def begin_session(self, id: str) -> int:
        """End a client's session and begin another; its epoch."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, epoch=known.epoch + 1)
        return known.epoch + 1

    def blame(self, id: str) -> int:
        """Count an offence; how many there are now."""
        known = self.client(id)
        assert known is not None
        self._set_client(id, offences=known.offences + 1)
        return known.offences + 1

    def _set_client(self, id: str, **values: object) -> None:
        self._db.execute(update(_clients).where(_clients.c.id == id).values(**values))

    def add_run(self, id: str, plan: str, machine: str) -> None:
        """Begin a run."""
        empty = Head(0, "0" * 64)
        self._db.execute(
            insert(_runs).values(
                id=id,
                plan=plan,
                status="running",
                machine=machine,
                state="",
                head_length=empty.length,
                head_hash=empty.hash,
            )
        )

    def run(self, id: str) -> RunRow | None:
        """A run by its name."""
        found = self._db.execute(select(_runs).where(_runs.c.id == id)).one_or_none()
        return None if found is None else _run(found)

    def runs(self) -> list[RunRow]:
        """All runs, in the order of their names."""
        return [_run(row) for row in self._db.execute(select(_runs).order_by(_runs.c.id))]

    def set_run(self, id: str, **values: object) -> None:
        """Change `status`, `machine` or `state` of a run."""
        self._db.execute(update(_runs).where(_runs.c.id == id).values(**values))

    def add_line(self, run: str, line: str, head: Head) -> None:
        """Write a line of a run's ledger; `head` is that after it."""
        self._db.execute(insert(_ledger).values(run=run, number=head.length - 1, line=line))
        self.set_run(run, head_length=head.length, head_hash=head.hash)

    def lines(self, run: str, start: int = 0) -> list[str]:
        """The lines of a run's ledger from a number on."""
        wanted = select(_ledger.c.line).where(_ledger.c.run == run, _ledger.c.number >= start)
        return list(self._db.execute(wanted.order_by(_ledger.c.number)).scalars())

    def add_tasks(self, run: str, tasks: Sequence[Task]) -> None:
        """Write down who is asked."""
        if tasks:
            rest = {"stage": Stage.ASKED, "update": "", "report": "{}", "signature": b""}
            self._db.execute(insert(_tasks), [{"run": run, **task._asdict(), **rest} for task in tasks])

    def task(self, run: str, attempt: int, client: int) -> TaskRow | None:
        """One task."""
        found = self._db.execute(select(_tasks).where(*_is_task(run, attempt, client))).one_or_none()
        return None if found is None else _task(found)

    def tasks(self, run: str, attempt: int) -> list[TaskRow]:
        """The tasks of an attempt, in the order of their clients."""
        wanted = select(_tasks).where(_tasks.c.run == run, _tasks.c.attempt == attempt).order_by(_tasks.c.client)
        return [_task(row) for row in self._db.execute(wanted)]

    def asked(self, client: int) -> list[tuple[str, Task]]:
        """What a client has still to do, oldest first, with the run."""
        wanted = select(_tasks).where(_tasks.c.client == client, _tasks.c.stage == Stage.ASKED)
        rows = self._db.execute(wanted.order_by(_tasks.c.attempt, _tasks.c.run))
        return [(row.run, _task(row).task) for row in rows]

    def arrived(self, run: str, task: Task, update_: str, report: Mapping[str, Any], signature: bytes) -> None:
        """Write down an update that is here and whole."""
        values = {"stage": Stage.ARRIVED, "update": update_, "report": json.dumps(report), "signature": signature}
        self._db.execute(update(_tasks).where(*_is_task(run, task.attempt, task.client)).values(values))

    def set_stage(self, run: str, tasks: Sequence[Task], stage: Stage) -> None:
        """Say what became of tasks."""
        for task in tasks:
            self._db.execute(update(_tasks).where(*_is_task(run, task.attempt, task.client)).values(stage=stage))

    def last_counted(self, run: str, client: int) -> int | None:
        """The newest attempt in which a client's update counted."""
        wanted = select(func.max(_tasks.c.attempt)).where(
            _tasks.c.run == run, _tasks.c.client == client, _tasks.c.stage == Stage.COUNTED
        )
        found: int | None = self._db.execute(wanted).scalar()
        return found

    def objects(self) -> set[str]:
        """Every object that is still needed: the runs' states, and updates that wait for a commit."""
        states = self._db.execute(select(_runs.c.state)).scalars()
        updates = self._db.execute(select(_tasks.c.update).where(_tasks.c.stage == Stage.ARRIVED)).scalars()
        return {name for name in (*states, *updates) if name}


def _is_task(run: str, attempt: int, client: int) -> tuple[Any, Any, Any]:
    return _tasks.c.run == run, _tasks.c.attempt == attempt, _tasks.c.client == client


def _client(row: Any) -> ClientRow:
    return ClientRow(row.id, row.name, bytes(row.key), Status(row.status), row.number, row.epoch, row.offences)


def _run(row: Any) -> RunRow:
    return RunRow(row.id, row.plan, row.status, row.machine, row.state, Head(row.head_length, row.head_hash))


def _task(row: Any) -> TaskRow:
    task = Task(row.client, row.version, row.attempt, row.share, row.work)
    return TaskRow(task, Stage(row.stage), row.update, json.loads(row.report), bytes(row.signature))


def _engine(url: str) -> Engine:
    """Connect; SQLite waits for the disk at every commit, and starts each change with its lock."""
    try:
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    except (ArgumentError, NoSuchModuleError) as error:
        raise PlanError(
            f"--store {url!r} is no address of a database: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def _set_up_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # this module says where transactions begin
    for setting in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 20000"):
        connection.execute(f"PRAGMA {setting}")
