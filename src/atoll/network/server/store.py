"""The database of a server, SQLite or PostgreSQL: opening it, locking it, and transactions.

Every change is one transaction, and transactions are serial: after a kill all of one is there, or nothing. Objects lie
elsewhere; they are durable before a transaction names them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from atoll.core.errors import PlanError, RunError
from atoll.network.protocol.blobs import open_private
from atoll.network.server.claim import Claim, claim_of, taken
from atoll.network.server.queries import Tables
from atoll.network.server.tables import check_layout


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
