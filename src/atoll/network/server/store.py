"""The database of a server, SQLite or PostgreSQL: opening it, locking it, and transactions.

Every change is one transaction, and transactions are serial: after a kill all of one is there, or nothing. Objects lie
elsewhere; they are durable before a transaction names them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from atoll.core.errors import PlanError, RunError
from atoll.network.protocol.blobs import open_private
from atoll.network.server.queries import Tables
from atoll.network.server.tables import check_layout

CLAIM = 0x41746F6C6C
"""Key of the advisory lock."""
CLAIM_SECONDS = 5.0
"""Seconds that a server waits for the database to release the lock of a killed one."""


def taken(engine: Engine) -> str:
    """Return the error text for a store that another server has locked."""
    return f"another server uses the store {engine.url}: stop that one, or give this one another --store"


class Claim(ABC):
    """An exclusive lock of a store."""

    @abstractmethod
    def renew(self) -> None:
        """Take the lock again after connections were lost, if possible."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock."""


def claim_of(engine: Engine) -> Claim:
    """Lock a store for this process; RunError if another server has locked it."""
    return DatabaseClaim(engine) if engine.dialect.name == "postgresql" else FileClaim(engine)


@final
class FileClaim(Claim):
    """An exclusive lock on a file beside the database, which SQLite itself does not touch."""

    def __init__(self, engine: Engine) -> None:
        with engine.connect() as connection:
            databases = connection.exec_driver_sql("PRAGMA database_list").all()
        path = next(row[2] for row in databases if row[1] == "main")
        self._file = Path(f"{path}.lock" if path else "/dev/null").open("w")  # noqa: SIM115 (open as long as the lock is held)
        try:
            if path:  # else it is in memory, which no other process can open
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RunError(taken(engine)) from error

    def renew(self) -> None:
        """Do nothing: a file has no connections."""

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


@final
class DatabaseClaim(Claim):
    """An advisory lock of PostgreSQL, which lasts as long as its connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection = self._connected()
        until = time.monotonic() + CLAIM_SECONDS
        while not self._lock():
            if time.monotonic() > until:
                self._connection.close()
                raise RunError(taken(engine))
            time.sleep(0.1)

    def renew(self) -> None:
        """Take the lock on a new connection. If the old one still holds it, no other server does."""
        self._connection.invalidate()
        self._connection = self._connected()
        self._lock()

    def close(self) -> None:
        """Close the connection, which would keep the lock in the pool."""
        if not self._connection.closed:
            self._connection.invalidate()
            self._connection.close()

    def _connected(self) -> Connection:
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def _lock(self) -> bool:
        return bool(self._connection.execute(text(f"SELECT pg_try_advisory_lock({CLAIM})")).scalar())


class StoreTaken(RunError):
    """Another server has locked this store: this one must end."""


class Store:
    """A database; change it in `with store.write() as tables`, and read it in `with store.read() as tables`."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._one_at_a_time = threading.Lock()
        self._claim: Claim | None = None
        self._cut_off = False
        """Whether a connection was lost, and perhaps the lock with it."""
        self._owner = ""
        """The mark of this server in the store; a server that finds another mark must end."""
        try:
            with self._engine.execution_options(writes=True).begin() as connection:
                check_layout(connection, self.name)
        except DBAPIError as error:
            raise RunError(f"the store {self.name} cannot be opened: {error.orig}; check --store") from error

    @property
    def name(self) -> str:
        """Return the address without its password."""
        return str(self._engine.url)

    def claim(self) -> None:
        """Lock the store for this process; RunError if another server has locked it.

        SQLite has a lock file beside it, PostgreSQL an advisory lock; the system releases both with the process. A mark
        of the owner is written too, and compared in every change: a server whose lock was lost, such as with its
        connection, and taken by another, changes nothing more.
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
        """Open a transaction, which is rolled back if anything is raised."""
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
        """Open a read-only view of one moment of the store."""
        with self._engine.connect() as connection:
            yield Tables(connection)

    def close(self) -> None:
        """Release the lock and the connections."""
        if self._claim is not None:
            self._claim.close()
        self._engine.dispose()


def _engine(url: str) -> Engine:
    """Make an engine; SQLite syncs at every commit, and takes its lock at the start of a write."""
    try:
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    except (ArgumentError, NoSuchModuleError) as error:
        raise PlanError(
            f"--store {url!r} is no address of a database: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":
        path = engine.url.database or ""
        if not path.startswith(":"):
            with suppress(OSError):  # SQLite reports what is wrong; its other files get the mode of this one
                os.close(open_private(path, os.O_RDWR | os.O_CREAT))
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def _set_up_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # transactions begin explicitly, below
    for setting in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 20000"):
        connection.execute(f"PRAGMA {setting}")
