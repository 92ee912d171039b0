"""The tables of a server's store, and a row of each as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
    update,
)

from atoll.core.errors import RunError
from atoll.core.messages import Task
from atoll.ledger.chain import Head

SCHEMA = 2
"""Layout 1 had no tables of agreed samples and refusals."""
LAYOUT = 0x41746F6C6D
"""The number by which processes know that another one looks at a database's layout."""


class Status(StrEnum):
    """What the operator thinks of a client."""

    PENDING = "pending"
    APPROVED = "approved"
    REVOKED = "revoked"
    QUARANTINED = "quarantined"
    """Shut out by itself, after repeated offences."""


class Stage(StrEnum):
    """What became of a task."""

    ASKED = "asked"
    ARRIVED = "arrived"
    COUNTED = "counted"
    FAILED = "failed"
    """Refused by the client, or rejected by the server; the report says why."""
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
    num_samples: int
    """How many it says it has; 0 before it said so."""


class RefusalRow(NamedTuple):
    """How often a client has refused work for a run."""

    client: int
    """Its number."""
    times: int
    whole_run: bool
    """Whether it takes no part in the run at all."""


class RunRow(NamedTuple):
    """A run and where it stands."""

    id: str
    plan: str
    status: str
    """running, or why it ended."""
    machine: str
    """The coordinator's state as JSON, after so many events as `seq` says."""
    seq: int
    state: str
    """The file that holds everything else as of the last commit; "" before there is one."""
    sizes: tuple[int, ...]
    """How many samples each client has, as the run was told when it began."""
    began: float
    """When the present attempt began, in seconds since 1970, for people: nothing is measured by it."""
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
    seq: int
    """Its place among the events of the run; 0 if nothing has come of it."""


all_tables = MetaData()
meta_table = Table(
    "meta", all_tables, Column("key", String(40), primary_key=True), Column("value", Text, nullable=False)
)
clients_table = Table(
    "clients",
    all_tables,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("key", LargeBinary, nullable=False),
    Column("status", String(10), nullable=False),
    Column("number", Integer, unique=True),
    Column("epoch", Integer, nullable=False),
    Column("offences", Integer, nullable=False),
    Column("num_samples", BigInteger, nullable=False),
)
agreed_table = Table(
    "agreed",
    all_tables,
    Column("client", String(32), primary_key=True),
    Column("num_samples", BigInteger, nullable=False),
)
refusals_table = Table(
    "refusals",
    all_tables,
    Column("run", String(64), primary_key=True),
    Column("client", Integer, primary_key=True),
    Column("times", Integer, nullable=False),
    Column("whole_run", Boolean, nullable=False),
)
tokens_table = Table(
    "tokens",
    all_tables,
    Column("hash", String(64), primary_key=True),
    Column("expires", Float, nullable=False),
    Column("used_by", String(32)),
)
runs_table = Table(
    "runs",
    all_tables,
    Column("id", String(64), primary_key=True),
    Column("plan", Text, nullable=False),
    Column("status", String(100), nullable=False),
    Column("machine", Text, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("state", String(100), nullable=False),
    Column("sizes", Text, nullable=False),
    Column("began", Float, nullable=False),
    Column("head_length", Integer, nullable=False),
    Column("head_hash", String(64), nullable=False),
)
tasks_table = Table(
    "tasks",
    all_tables,
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
    Column("seq", Integer, nullable=False),
)
rounds_table = Table(
    "rounds",
    all_tables,
    Column("run", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("row", Text, nullable=False),
)
ledger_table = Table(
    "ledger",
    all_tables,
    Column("run", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("line", Text, nullable=False),
)


def check_layout(connection: Connection, store: str) -> None:
    """Make the tables of an empty store, all or none; refuse one of another layout, or that is not whole."""
    if connection.dialect.name == "postgresql":  # SQLite's writer has the file for itself
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LAYOUT})"))
    there, tables = inspect(connection), {table.name: table for table in all_tables.sorted_tables}
    here = tables.keys() & set(there.get_table_names())
    if not here:
        all_tables.create_all(connection)
        connection.execute(insert(meta_table).values(key="schema", value=str(SCHEMA)))
        return
    columns = {name: {column["name"] for column in there.get_columns(name)} for name in here}
    found = None
    if columns.get(meta_table.name, set()) >= {"key", "value"}:
        found = connection.execute(select(meta_table.c.value).where(meta_table.c.key == "schema")).scalar()
    if found is None:
        raise RunError(
            f"the store {store} has tables ({', '.join(sorted(here))}) but does not say which layout it has: it is not "
            "one of Atoll's, or it is damaged; restore it from a backup, or give another --store"
        )
    if found == "1":
        all_tables.create_all(connection, tables=[agreed_table, refusals_table])
        connection.execute(update(meta_table).where(meta_table.c.key == "schema").values(value=str(SCHEMA)))
        check_layout(connection, store)
        return
    if found != str(SCHEMA):
        raise RunError(
            f"the store {store} has layout {found}, this Atoll knows {SCHEMA}: use the Atoll that made it, or give "
            "another --store"
        )
    missing = [
        name if name not in here else f"{name}.{column.name}"
        for name, table in tables.items()
        for column in table.columns
        if column.name not in columns.get(name, set())
    ]
    if missing:
        raise RunError(
            f"the store {store} lacks {', '.join(dict.fromkeys(missing))}: it is damaged; restore it from a backup"
        )


def is_task(run: Any, attempt: Any, client: Any) -> tuple[Any, Any, Any]:
    """Which task is meant."""
    return tasks_table.c.run == run, tasks_table.c.attempt == attempt, tasks_table.c.client == client


def client_of(row: Any) -> ClientRow:
    """A client as it was read."""
    return ClientRow(
        row.id, row.name, bytes(row.key), Status(row.status), row.number, row.epoch, row.offences, row.num_samples
    )


def run_of(row: Any) -> RunRow:
    """A run as it was read."""
    head, sizes = Head(row.head_length, row.head_hash), tuple(json.loads(row.sizes))
    return RunRow(row.id, row.plan, row.status, row.machine, row.seq, row.state, sizes, row.began, head)


def task_of(row: Any) -> TaskRow:
    """A task as it was read."""
    task = Task(row.client, row.version, row.attempt, row.share, row.work)
    return TaskRow(task, Stage(row.stage), row.update, msgspec.json.decode(row.report), bytes(row.signature), row.seq)
