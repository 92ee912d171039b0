"""The tables of the store, and their rows as records."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

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

SCHEMA = 3
"""The version of the layout; layout 2 had no tables of evaluations and readiness, layout 1 none of agreed samples and
refusals either."""
LAYOUT = 0x41746F6C6D
"""Key of the advisory lock under which the layout is checked."""
NOBODY = -1
"""The number of no client."""


class Status(StrEnum):
    """Whether a client may take part."""

    PENDING = "pending"
    APPROVED = "approved"
    REVOKED = "revoked"
    QUARANTINED = "quarantined"
    """Excluded by the server after repeated offences."""


class Stage(StrEnum):
    """The stage of a task."""

    ASKED = "asked"
    ARRIVED = "arrived"
    COUNTED = "counted"
    FAILED = "failed"
    """Refused by the client, or rejected by the server; the report holds the reason."""
    CLOSED = "closed"
    """No longer waited for."""


class ClientRow(NamedTuple):
    """An enrolled client."""

    id: str
    name: str
    key: bytes
    status: Status
    number: int | None
    """Its number in plans; None before approval."""
    epoch: int
    """The epoch of its newest session."""
    offences: int
    num_samples: int
    """The number of samples that it states; 0 before its first poll."""


class RefusalRow(NamedTuple):
    """The refusals of a client in a run."""

    client: int
    """Its number."""
    times: int
    whole_run: bool
    """Whether it has left the run."""


class RunRow(NamedTuple):
    """A run and its state."""

    id: str
    plan: str
    status: str
    """"running", or why it ended."""
    machine: str
    """The coordinator's state as JSON, after the event number `seq`."""
    seq: int
    state: str
    """The file of the run's state as of the last commit; "" before the first."""
    sizes: tuple[int, ...]
    """The number of samples of each client, as the run counts them."""
    began: float
    """When the attempt began, in seconds since 1970; for display only."""
    head: Head


class TaskRow(NamedTuple):
    """A task and its outcome."""

    task: Task
    stage: Stage
    update: str
    """The name of the update's object, or ""."""
    report: Mapping[str, Any]
    signature: bytes
    """The client's signature of the update."""
    seq: int
    """The event number of the outcome; 0 without one."""


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

evaluations_table = Table(
    "evaluations",
    all_tables,
    Column("run", String(64), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("client", Integer, primary_key=True),
    Column("answer", Text, nullable=False),
)
readiness_table = Table(
    "readiness",
    all_tables,
    Column("run", String(64), primary_key=True),
    Column("client", String(32), primary_key=True),
    Column("answer", Text, nullable=False),
)
ADDED = {
    "1": (agreed_table, refusals_table, evaluations_table, readiness_table),
    "2": (evaluations_table, readiness_table),
}
"""Tables that earlier layouts lack."""


def check_layout(connection: Connection, store: str) -> None:
    """Create the tables of an empty store, upgrade earlier layouts, and refuse another or a damaged one."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LAYOUT})"))
    there, tables = inspect(connection), {table.name: table for table in all_tables.sorted_tables}
    here = tables.keys() & set(there.get_table_names())
    if not here:
        all_tables.create_all(connection)
        connection.execute(insert(meta_table).values(key="schema", value=str(SCHEMA)))
        return
    columns = {name: {column["name"] for column in there.get_columns(name)} for name in here}
    layout = None
    if columns.get(meta_table.name, set()) >= {"key", "value"}:
        layout = connection.execute(select(meta_table.c.value).where(meta_table.c.key == "schema")).scalar()
    if layout is None:
        raise RunError(
            f"the store {store} has tables ({', '.join(sorted(here))}) but does not say which layout it has: it is not "
            "one of Atoll's, or it is damaged; restore it from a backup, or give another --store"
        )
    if layout in ADDED:
        all_tables.create_all(connection, tables=ADDED[layout])
        connection.execute(update(meta_table).where(meta_table.c.key == "schema").values(value=str(SCHEMA)))
        check_layout(connection, store)
        return
    if layout != str(SCHEMA):
        raise RunError(
            f"the store {store} has layout {layout}, this Atoll knows {SCHEMA}: use the Atoll that made it, or give "
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
    """Return the conditions that select a task."""
    return tasks_table.c.run == run, tasks_table.c.attempt == attempt, tasks_table.c.client == client
