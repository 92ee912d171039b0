"""Locks by which a store has one server at a time; the system releases them with the process."""

from __future__ import annotations

import fcntl
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from sqlalchemy import Connection, Engine, text

from atoll.core.errors import RunError

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
