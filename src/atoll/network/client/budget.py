"""What a client has spent of its privacy in all runs, on all servers: charged, and on disk, before work is done.

A file of JSON lines that is only added to. A line says what one run has cost so far, as an event for an accountant, and
the newest line of a run holds. Homes may share a file: it is locked while it is read and added to.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import AtollError, RunError
from atoll.core.privacy import IN_TURN
from atoll.network.protocol.blobs import disk_errors, sync_directory
from atoll.privacy.composing import as_event, as_plain, spent_together
from atoll.train.job import Job

NAME = "budget.jsonl"
"""The file in a client's home."""


class Overspent(AtollError):
    """Work that would spend more privacy than its owner allows; the server is told why."""


class Cost(msgspec.Struct, frozen=True):
    """What a run has cost so far."""

    attempts: int
    done: int
    """How many of them this client worked for."""
    unit: str
    """Whose presence is hidden: clients' or samples'."""
    delta: float
    event: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """A charge as it is written down."""

    server: str
    run: str
    cost: Cost


def cost_of(job: Job, attempts: int, done: int = 0) -> Cost:
    """What so many attempts of a private run cost this client, which worked for some of them.

    Where clients are asked in turn, a server that asks one more often than that makes it pay for each time.
    """
    mechanism, exposure = job.mechanism, job.exposure
    assert mechanism is not None and exposure is not None
    counted = max(attempts, done * exposure.attempts_per_pass) if exposure.scheme == IN_TURN else attempts
    event = mechanism.event(exposure._replace(attempts=counted))
    return Cost(attempts=attempts, done=done, unit=mechanism.unit, delta=mechanism.delta, event=as_plain(event))


class Budget:
    """The part of one run in what a client has spent."""

    def __init__(self, path: Path, server: str, run: str) -> None:
        self.path, self._who = path, (server, run)

    def charge(self, attempt: int, cost: Callable[[int], Cost], most: float | None) -> None:
        """Charge what this run has cost with its next piece of work, or raise Overspent if that is too much in all.

        `cost` says what it is, for the number of attempts that were worked for. An attempt is charged once.
        """
        with self._locked() as descriptor:
            costs = self._read()
            before = costs.get(self._who)
            if before is not None and before.attempts > attempt:
                return
            cost_now = cost(1 if before is None else before.done + 1)
            self._check({**costs, self._who: cost_now}, most, f"attempt {attempt}")
            self._append(descriptor, Line(*self._who, cost_now))

    def must_pay(self, cost: Cost, most: float | None) -> None:
        """Raise Overspent if what other runs have cost so far, and all of this one, would be too much."""
        with self._locked():
            self._check({**self._read(), self._who: cost}, most, f"all {cost.attempts} rounds of this run")

    def _check(self, costs: dict[tuple[str, str], Cost], most: float | None, what: str) -> None:
        """Refuse costs that together are more than is allowed; they are added up at the smallest delta of all."""
        if most is None:
            return
        own, others = costs[self._who], [cost for who, cost in costs.items() if who != self._who]
        if any(cost.unit != own.unit for cost in others):
            raise Overspent(
                f"this run protects each {own.unit}, and others in {self.path} do not: what they cost cannot be added "
                "up against floors.max_epsilon; ask for a run that protects the same"
            )
        delta = min(cost.delta for cost in costs.values())
        epsilon, accountant = spent_together([as_event(cost.event) for cost in costs.values()], delta, most)
        if epsilon > most:
            shared = f" with what {len(others)} other run{'s' * (len(others) > 1)} spent" if others else ""
            raise Overspent(
                f"{what} would bring epsilon to {epsilon:.3g}{shared} (delta {delta:g}, {accountant}), this client "
                f"allows {most:g} over all runs"
            )

    def _read(self) -> dict[tuple[str, str], Cost]:
        """What each run has cost; a last line that was cut off by a kill was never charged."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        try:
            lines = [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]
        except msgspec.MsgspecError as error:
            raise RunError(
                f"{self.path} is damaged ({error}): restore it from a copy that is as new as this client's work; "
                "without it nobody knows what was spent"
            ) from error
        return {(line.server, line.run): line.cost for line in lines}

    def _append(self, descriptor: int, line: Line) -> None:
        """Add a line, on disk before this returns: all of it, or none if the disk is full."""
        size = os.fstat(descriptor).st_size
        with disk_errors(self.path.parent):
            try:
                os.write(descriptor, msgspec.json.encode(line) + b"\n")
                os.fsync(descriptor)
            except OSError:
                os.truncate(descriptor, size)
                raise

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file for one process at a time; it is made if there is none."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be opened ({error.strerror}): nothing is done that is not charged"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            sync_directory(self.path.parent)
            yield descriptor
        finally:
            os.close(descriptor)
