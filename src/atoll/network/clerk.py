"""The clerk: one thread that writes down what happens, several things in one transaction when they come together.

Nothing in memory changes before the store has it: a change works on a draft, which takes effect when the transaction
is over. If that fails, everybody who waits is told to come again, and nothing has happened.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from sqlalchemy.exc import DBAPIError

from atoll.core.coordinator import CoordinatorState
from atoll.core.errors import AtollError
from atoll.network.gate import Refused
from atoll.network.logs import log
from atoll.network.objects import DiskFull
from atoll.network.runs import Run
from atoll.network.store import Book, Store

TICK = 0.2
"""Seconds between two looks at the clock."""
RETRY = 5.0
"""Seconds after which those try again who could not be served."""
MOST = 256
"""So many changes go into one transaction at most."""


class Draft:
    """What a transaction is about to change."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._machines: dict[str, tuple[Run, CoordinatorState, int]] = {}
        self._effects: list[Callable[[], None]] = []

    def machine(self, run: Run) -> tuple[CoordinatorState, int]:
        """Where a run stands, earlier changes of this transaction included, and how many events it has had."""
        _, machine, seq = self._machines.get(run.name, (run, run.machine, run.seq))
        return machine, seq

    def move(self, run: Run, machine: CoordinatorState, seq: int) -> None:
        """Let a run stand there."""
        self._machines[run.name] = (run, machine, seq)

    def then(self, effect: Callable[[], None]) -> None:
        """Do this once everything is written down."""
        self._effects.append(effect)

    def take_effect(self) -> None:
        """It is written down."""
        for run, machine, seq in self._machines.values():
            run.machine, run.seq = machine, seq
        for effect in self._effects:
            try:
                effect()
            except (OSError, AtollError) as error:  # files for people: written anew at the next start
                log("read_only", why=str(error))


Change = Callable[[Draft], Any]


class Clerk:
    """Makes changes, and calls `tick` in between, all in one thread; `lock` is held while memory changes."""

    def __init__(self, store: Store, tick: Callable[[], None], trouble: Callable[[str], None]) -> None:
        self._store, self._tick, self._trouble = store, tick, trouble
        self._inbox: queue.SimpleQueue[tuple[Change, Future[Any]] | None] = queue.SimpleQueue()
        self._going = True
        self.lock = threading.RLock()
        self._thread = threading.Thread(target=self._work, name="clerk")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def nudge(self) -> None:
        """Look at the clock now."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Finish what was asked for, and end."""
        self._going = False
        self.nudge()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, change: Change) -> Future[Any]:
        """Make a change soon; the future tells when it is safe, or why it was refused."""
        future: Future[Any] = Future()
        self._inbox.put((change, future))
        return future

    def make(self, change: Change) -> Any:
        """Make a change, and wait until it is safe."""
        return self.submit(change).result()

    def _work(self) -> None:
        while self._going or not self._inbox.empty():
            batch: list[tuple[Change, Future[Any]]] = []
            try:
                item = self._inbox.get(timeout=TICK)
                while item is not None and len(batch) < MOST - 1:
                    batch.append(item)
                    item = self._inbox.get_nowait()
                batch += [item] if item is not None else []
            except queue.Empty:
                pass
            if batch:
                self._write(batch)
            self._tick()

    def _write(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        answers: list[tuple[Future[Any], Any, Refused | None]] = []
        try:
            with self._store.change() as book:
                draft = Draft(book)
                for change, future in batch:
                    try:
                        answers.append((future, change(draft), None))
                    except Refused as refused:  # before it has written anything
                        answers.append((future, None, refused))
            with self.lock:
                draft.take_effect()
        except (DBAPIError, DiskFull) as error:
            why = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
            self._trouble(why)
            busy = Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"nothing can be written just now ({why})", RETRY)
            for _, future in batch:
                future.set_exception(busy)
            return
        except Exception as error:  # a defect: nothing was written
            for _, future in batch:
                future.set_exception(error)
            return
        self._trouble("")
        for future, answer, problem in answers:
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(answer)
