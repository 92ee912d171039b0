"""What all trackers share: figures of rounds as flat names, sent in groups, and where a resumed run goes on."""

from __future__ import annotations

import atexit
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from atoll.core.errors import RunError
from atoll.core.events import Event, NewClientsEvaluated, RoundCommitted, RunEnded, RunStarted
from atoll.core.plan import Plan
from atoll.report.figures import write_whole
from atoll.report.file_checks import is_number
from atoll.report.reading import read_run

SECONDS = 2.0
"""Figures are sent at most so often, and at the end."""
NOTHING = -1
"""In place of the last round that a tool holds: it holds none."""
CUT_OFF = "ended without a result"
"""Reason for the end of a run whose process ended before the run did."""


class Figures(NamedTuple):
    """The figures of a round."""

    round: int
    values: Mapping[str, float]


class Tracked(Protocol):
    """A run as a tool keeps it."""

    def start(self, title: str, plan: Plan | None, version: int) -> int:
        """Begin, or go on with the same tracked run; return the last round that it holds and keeps, or NOTHING."""

    def log(self, rows: Sequence[Figures]) -> None:
        """Add figures of rounds, in order."""

    def end(self, reason: str) -> None:
        """Close it; `reason` is why the run ended."""


@final
class Tracker:
    """A reader of events that hands figures to a tracked run.

    With the run's directory, rounds from before a resume that the tool does not hold are read from metrics.jsonl.
    """

    def __init__(self, tracked: Tracked, directory: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracked, self._directory, self._clock = tracked, directory, clock
        self._waiting: list[Figures] = []
        self._sent_at = -SECONDS
        self._last = Figures(NOTHING, {})
        """The round that was heard last, with all of its figures."""

    def __call__(self, event: Event) -> None:
        """Take an event; what the tool raises is raised, and the run goes on without this reader."""
        try:
            self._take(event)
        except Exception:
            atexit.unregister(self._cut_off)
            raise

    def _take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case RoundCommitted():
                self._add(Figures(int(event.row["round"]), dict(flat(event.row))))
            case NewClientsEvaluated():
                figures = {f"after_{steps}_steps": each for steps, each in event.figures.items()}
                self._add(Figures(event.version, dict(flat({"new_clients": figures}))))
            case RunEnded():
                self._end(event.reason)
            case _:
                pass
        if self._waiting and self._clock() - self._sent_at >= SECONDS:
            self._send()

    def _start(self, event: RunStarted) -> None:
        record = None if self._directory is None else read_run(self._directory)
        held = self._tracked.start(event.title, record.plan if record else None, event.version)
        self._last = Figures(held, {})
        atexit.register(self._cut_off)
        for row in record.rows if record else ():
            if row["round"] <= event.version:
                self._add(Figures(row["round"], dict(flat(row))))

    def _add(self, figures: Figures) -> None:
        """Keep what the tool does not hold: of the last round, further figures only; of earlier ones, nothing."""
        if figures.round < self._last.round or (figures.round == self._last.round and not self._last.values):
            return  # run again after a resume, to the same figures
        known = self._last.values if figures.round == self._last.round else {}
        fresh = {name: value for name, value in figures.values.items() if name not in known}
        if fresh:
            self._waiting.append(Figures(figures.round, fresh))
        self._last = Figures(figures.round, {**known, **fresh})

    def _send(self) -> None:
        rows, self._waiting = self._waiting, []
        self._tracked.log(rows)
        self._sent_at = self._clock()

    def _end(self, reason: str) -> None:
        atexit.unregister(self._cut_off)
        self._send()
        self._tracked.end(reason)

    def _cut_off(self) -> None:
        """Close the tracked run of a process that ends before the run did, as far as the tool lets it."""
        with contextlib.suppress(Exception):
            self._end(CUT_OFF)


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a metrics row by their paths, without the round and tables of single clients.

    >>> dict(flat({"round": 3, "test": {"accuracy": 0.9, "f1": None}, "detection": {"clients": {"7": 1.0}}}))
    {'test/accuracy': 0.9}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            if key != "clients":
                yield from flat(value, f"{prefix}{key}/")
        elif is_number(value) and (prefix or key != "round"):
            yield f"{prefix}{key}", float(value)


def settings_of(plan: Plan) -> dict[str, str]:
    """Return the settings of a plan by dotted keys, as text.

    >>> settings_of(Plan(rounds=3))["local.lr"]
    '0.1'
    """

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value if isinstance(value, str) else json.dumps(value)

    return dict(walk(plan.to_dict(), ""))


def missing(tool: str, extra: str, error: ImportError) -> RunError:
    """Return the error for a tool that is not installed."""
    return RunError(f"tracking by {tool} needs its package ({error}): pip install 'atoll[{extra}]'")


class Note:
    """A small JSON file in a run's directory that says which tracked run it belongs to; empty without a directory."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self._path = None if directory is None else directory / name

    def read(self) -> dict[str, Any]:
        """Return what was noted; nothing if the file is missing or damaged, so that a new tracked run begins."""
        try:
            noted = json.loads(self._path.read_text()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def write(self, noted: Mapping[str, Any]) -> None:
        """Replace what was noted."""
        if self._path is not None:
            write_whole(self._path, (json.dumps(noted) + "\n").encode())
