"""Locks by which a store has one server at a time. The system lets go of them with the process, however it ends."""

from __future__ import annotations

import fcntl
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from sqlalchemy import Connection, Engine, text

from atoll.core.errors import RunError

CLAIM = 0x41746F6C6C
"""The number by which servers know that a database has one."""
CLAIM_SECONDS = 5.0
"""How long a server waits for one that was killed a moment ago to be forgotten by a database."""


def taken(engine: Engine) -> str:
    """Say that another server has a store, and what to do."""
    return f"another server uses the store {engine.url}: stop that one, or give this one another --store"


class Claim(ABC):
    """A store that is this process's alone."""

    @abstractmethod
    def renew(self) -> None:
        """Lock again after connections were lost, as far as that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Let go."""


def claim_of(engine: Engine) -> Claim:
    """Lock a store for this process; RunError if another server has it."""
    return DatabaseClaim(engine) if engine.dialect.name == "postgresql" else FileClaim(engine)


@final
class FileClaim(Claim):
    """An exclusive lock on a file beside the database, which SQLite itself does not touch."""

    def __init__(self, engine: Engine) -> None:
        with engine.connect() as connection:
            databases = connection.exec_driver_sql("PRAGMA database_list").all()
        path = next(row[2] for row in databases if row[1] == "main")
        self._file = Path(f"{path}.lock" if path else "/dev/null").open("w")  # noqa: SIM115 (it is open as long as the lock is wanted)
        try:
            if path:  # else it is in memory, where nobody else can be
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RunError(taken(engine)) from error

    def renew(self) -> None:
        """Do nothing: a file has no connections."""

    def close(self) -> None:
        """Let go."""
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
        """Lock again on a new connection. If the old one still has the lock, nobody else has it either."""
        self._connection.invalidate()
        self._connection = self._connected()
        self._lock()

    def close(self) -> None:
        """Let go: the connection is cut, as it would keep the lock in the pool."""
        if not self._connection.closed:
            self._connection.invalidate()
            self._connection.close()

    def _connected(self) -> Connection:
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def _lock(self) -> bool:
        return bool(self._connection.execute(text(f"SELECT pg_try_advisory_lock({CLAIM})")).scalar())
