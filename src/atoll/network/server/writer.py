"""The single writer: one thread that makes all changes, several in one transaction when they come together.

Memory changes only after the store: a change works on a `Transaction`, which is applied to memory once it is
committed. If the commit fails, nothing has changed, and all callers are told to retry.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from atoll.core.coordinator import CoordinatorState
from atoll.core.errors import DiskFull
from atoll.network.server.auth import Refused
from atoll.network.server.monitoring import log
from atoll.network.server.queries import Tables
from atoll.network.server.runs import Run
from atoll.network.server.store import Store, StoreTaken
from atoll.network.server.uploads import UpdatePack

TICK = 0.2
"""Seconds between two calls of `tick`."""
RETRY = 5.0
"""Seconds after which a client retries a request that could not be served."""
MAX_CHANGES = 256
"""Maximum number of changes in a transaction."""
TEMPORARY = (OperationalError, InterfaceError, DiskFull)
"""Errors of a disk or database that is full, away or busy, which may pass."""
NO_FILES = (errno.EMFILE, errno.ENFILE)
"""Error numbers of too many open files, which may pass too."""


class Transaction:
    """Changes of the store and of memory that become valid together."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._machines: dict[str, tuple[Run, CoordinatorState, int]] = {}
        self._packs: dict[str, UpdatePack] = {}
        self._before: dict[Hashable, Callable[[], None]] = {}
        self._effects: list[Callable[[], None]] = []

    def machine(self, run: Run) -> tuple[CoordinatorState, int]:
        """Return a run's coordinator state and number of events, with earlier changes of this transaction."""
        _, machine, seq = self._machines.get(run.name, (run, run.machine, run.seq))
        return machine, seq

    def set_machine(self, run: Run, machine: CoordinatorState, seq: int) -> None:
        """Set a run's coordinator state and number of events."""
        self._machines[run.name] = (run, machine, seq)

    def pack(self, run: Run) -> UpdatePack:
        """Return the file to which small updates of a run are written together."""
        if run.name not in self._packs:
            self._packs[run.name] = UpdatePack(run.uploads)
            self.before_commit(run.name, self._packs[run.name].write)
        return self._packs[run.name]

    def before_commit(self, key: Hashable, work: Callable[[], None]) -> None:
        """Register work to be done before the commit; later work replaces that of an equal key."""
        self._before[key] = work

    def run_before_commit(self) -> None:
        """Do the registered work, such as syncing files that the transaction names."""
        for work in self._before.values():
            work()

    def after_commit(self, effect: Callable[[], None]) -> None:
        """Register an effect on memory for after the commit."""
        self._effects.append(effect)

    def apply(self) -> None:
        """Apply the changes to memory, after the commit."""
        for run, machine, seq in self._machines.values():
            run.machine, run.seq = machine, seq
        for effect in self._effects:
            try:
                effect()
            except Exception as error:  # the commit stands, whatever an effect does
                log("read_only", why=str(error))


Change = Callable[[Transaction], Any]


class Writer:
    """Makes changes, and calls `tick` between them, in one thread; `lock` is held while memory changes."""

    def __init__(self, store: Store, tick: Callable[[], None], on_failure: Callable[[str], None]) -> None:
        self._store, self._tick, self._on_failure = store, tick, on_failure
        self.on_store_taken: Callable[[str], None] = lambda why: None
        """Called when another server has locked the store."""
        self._inbox: queue.SimpleQueue[tuple[Change, Future[Any]] | None] = queue.SimpleQueue()
        self._going = True
        self.lock = threading.RLock()
        self._thread = threading.Thread(target=self._loop, name="writer")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Call `tick` soon."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Make the submitted changes, and end the thread."""
        self._going = False
        self.wake()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, change: Change) -> Future[Any]:
        """Queue a change; the future brings its result once it is committed, or its error."""
        future: Future[Any] = Future()
        self._inbox.put((change, future))
        return future

    def write(self, change: Change) -> Any:
        """Make a change, and wait until it is committed."""
        return self.submit(change).result()

    def _loop(self) -> None:
        due = 0.0
        while self._going or not self._inbox.empty():
            batch: list[tuple[Change, Future[Any]]] = []
            try:
                item = self._inbox.get(timeout=TICK)
                while item is not None and len(batch) < MAX_CHANGES - 1:
                    batch.append(item)
                    item = self._inbox.get_nowait()
                batch += [item] if item is not None else []
                due = due if item is not None else 0.0  # `wake` was called
            except queue.Empty:
                pass
            if batch:
                self._write_batch(batch)
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + TICK

    def _write_batch(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        """Make changes in one transaction; if one fails, each in one of its own, so that it harms no other."""
        answers: list[tuple[Future[Any], Any, Refused | None]] = []
        try:
            with self._store.write() as tables:
                transaction = Transaction(tables)
                for change, future in batch:
                    try:
                        answers.append((future, change(transaction), None))
                    except Refused as refused:  # before it has written anything
                        answers.append((future, None, refused))
                transaction.run_before_commit()
        except Exception as error:
            unavailable = self.as_unavailable(error)
            if unavailable is None and len(batch) > 1:
                for each in batch:
                    self._write_batch([each])
                return
            for _, future in batch:
                future.set_exception(unavailable or error)
            return
        with self.lock:
            transaction.apply()
        for future, answer, problem in answers:
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(answer)

    def as_unavailable(self, error: Exception) -> Refused | None:
        """Return the answer to clients for an error that may pass, and report it; None for any other error."""
        if isinstance(error, StoreTaken):
            self.on_store_taken(str(error))
        elif not isinstance(error, TEMPORARY) and getattr(error, "errno", None) not in NO_FILES:
            return None
        why = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
        self._on_failure(why)
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"nothing can be written just now ({why})", RETRY)
