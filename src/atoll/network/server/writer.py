"""The clerk: one thread that writes down what happens, several things in one transaction when they come together.

Nothing in memory changes before the store has it: a change works on a draft, which takes effect when the transaction
is over. If that fails, everybody who waits is told to come again, and nothing has happened.
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
from atoll.network.server.logs import log
from atoll.network.server.runs import Run
from atoll.network.server.store import Store, StoreTaken, Tables
from atoll.network.server.uploads import UpdatePack

TICK = 0.2
"""Seconds between two looks at the clock."""
RETRY = 5.0
"""Seconds after which those try again who could not be served."""
MOST = 256
"""So many changes go into one transaction at most."""
PASSING = (OperationalError, InterfaceError, DiskFull)
"""What is wrong with the disk or the database, and passes: they are full, away or busy."""
NO_FILES = (errno.EMFILE, errno.ENFILE)
"""As many files are open as may be, which passes too."""


class Transaction:
    """What a transaction is about to change."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._machines: dict[str, tuple[Run, CoordinatorState, int]] = {}
        self._packs: dict[str, UpdatePack] = {}
        self._before: dict[Hashable, Callable[[], None]] = {}
        self._effects: list[Callable[[], None]] = []

    def machine(self, run: Run) -> tuple[CoordinatorState, int]:
        """Where a run stands, earlier changes of this transaction included, and how many events it has had."""
        _, machine, seq = self._machines.get(run.name, (run, run.machine, run.seq))
        return machine, seq

    def set_machine(self, run: Run, machine: CoordinatorState, seq: int) -> None:
        """Let a run stand there."""
        self._machines[run.name] = (run, machine, seq)

    def pack(self, run: Run) -> UpdatePack:
        """What is written to one file of a run before anything else is."""
        if run.name not in self._packs:
            self._packs[run.name] = UpdatePack(run.uploads)
            self.before_commit(run.name, self._packs[run.name].write)
        return self._packs[run.name]

    def before_commit(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do this before anything is written down for good; of equal keys the last one only."""
        self._before[key] = work

    def run_before_commit(self) -> None:
        """Do what must be done first."""
        for work in self._before.values():
            work()

    def after_commit(self, effect: Callable[[], None]) -> None:
        """Do this once everything is written down."""
        self._effects.append(effect)

    def apply(self) -> None:
        """It is written down."""
        for run, machine, seq in self._machines.values():
            run.machine, run.seq = machine, seq
        for effect in self._effects:
            try:
                effect()
            except Exception as error:  # what is written down is so, whatever becomes of the rest
                log("read_only", why=str(error))


Change = Callable[[Transaction], Any]


class Writer:
    """Makes changes, and calls `tick` in between, all in one thread; `lock` is held while memory changes."""

    def __init__(self, store: Store, tick: Callable[[], None], trouble: Callable[[str], None]) -> None:
        self._store, self._tick, self._on_failure = store, tick, trouble
        self.on_store_taken: Callable[[str], None] = lambda why: None
        """Told that the store is another server's now."""
        self._inbox: queue.SimpleQueue[tuple[Change, Future[Any]] | None] = queue.SimpleQueue()
        self._going = True
        self.lock = threading.RLock()
        self._thread = threading.Thread(target=self._loop, name="writer")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look at the clock now."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Finish what was asked for, and end."""
        self._going = False
        self.wake()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, change: Change) -> Future[Any]:
        """Make a change soon; the future tells when it is safe, or why it was refused."""
        future: Future[Any] = Future()
        self._inbox.put((change, future))
        return future

    def write(self, change: Change) -> Any:
        """Make a change, and wait until it is safe."""
        return self.submit(change).result()

    def _loop(self) -> None:
        due = 0.0
        while self._going or not self._inbox.empty():
            batch: list[tuple[Change, Future[Any]]] = []
            try:
                item = self._inbox.get(timeout=TICK)
                while item is not None and len(batch) < MOST - 1:
                    batch.append(item)
                    item = self._inbox.get_nowait()
                batch += [item] if item is not None else []
                due = due if item is not None else 0.0  # somebody wants to be heard
            except queue.Empty:
                pass
            if batch:
                self._write_batch(batch)
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + TICK

    def _write_batch(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        """Make changes in one transaction; if one of them fails, each in one of its own, so that none harms another."""
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
            busy = self.as_unavailable(error)
            if busy is None and len(batch) > 1:
                for each in batch:
                    self._write_batch([each])
                return
            for _, future in batch:
                future.set_exception(busy or error)
            return
        with self.lock:
            transaction.apply()
        for future, answer, problem in answers:
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(answer)

    def as_unavailable(self, error: Exception) -> Refused | None:
        """What everybody is told while nothing can be written; None if that is not what is wrong."""
        if isinstance(error, StoreTaken):
            self.on_store_taken(str(error))
        elif not isinstance(error, PASSING) and getattr(error, "errno", None) not in NO_FILES:
            return None
        why = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
        self._on_failure(why)
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"nothing can be written just now ({why})", RETRY)
