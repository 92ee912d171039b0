"""The privacy budget of a client over all runs on all servers: charged on disk before work is done.

The file has a JSON line for each charge and is only appended to. A line holds the cost of one run so far, as an event
for an accountant; the newest line of a run is valid. Homes may share the file: it is locked while it is in use.
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
    """Work that would spend more privacy than the owner allows; the server receives the reason."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a run so far."""

    attempts: int
    done: int
    """Attempts for which this client worked."""
    unit: str
    """What the guarantee protects: clients or samples."""
    delta: float
    event: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """A line of the file."""

    server: str
    run: str
    cost: Cost


def cost_of(job: Job, attempts: int, done: int = 0) -> Cost:
    """Return the cost of attempts of a private run, of which this client worked for `done`.

    Where clients are asked in turn, a client that is asked more often pays for each time.
    """
    mechanism, exposure = job.mechanism, job.exposure
    assert mechanism is not None and exposure is not None
    counted = max(attempts, done * exposure.attempts_per_pass) if exposure.scheme == IN_TURN else attempts
    event = mechanism.event(exposure._replace(attempts=counted))
    return Cost(attempts=attempts, done=done, unit=mechanism.unit, delta=mechanism.delta, event=as_plain(event))


class Budget:
    """The account of one run in a client's budget."""

    def __init__(self, path: Path, server: str, run: str) -> None:
        self.path, self._who = path, (server, run)

    def charge(self, attempt: int, cost: Callable[[int], Cost], most: float | None) -> None:
        """Charge an attempt, once; Overspent if all runs together would cost more than `most`.

        `cost` returns the cost of the run for a number of attempts for which the client worked.
        """
        with self._locked() as descriptor:
            costs = self._read()
            before = costs.get(self._who)
            if before is not None and before.attempts > attempt:
                return
            cost_now = cost(1 if before is None else before.done + 1)
            self._check({**costs, self._who: cost_now}, most, f"attempt {attempt}")
            self._append(descriptor, Line(*self._who, cost_now))

    def check_affordable(self, cost: Cost, most: float | None) -> None:
        """Raise Overspent if other runs so far and all of this one would cost more than `most`."""
        with self._locked():
            self._check({**self._read(), self._who: cost}, most, f"all {cost.attempts} rounds of this run")

    def _check(self, costs: dict[tuple[str, str], Cost], most: float | None, what: str) -> None:
        """Refuse costs whose composition, at the smallest delta of all, exceeds `most`."""
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
        """Read the cost of each run; drop a last line that a kill cut off, which was never charged."""
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
        """Append a durable line; if the disk is full, nothing of it."""
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
        """Open the file under an exclusive lock; create it if it does not exist."""
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
