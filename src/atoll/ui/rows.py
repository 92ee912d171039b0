"""Rows of a run's metrics for the live page: read as they are written, thinned, and as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.report.main_figure import SHARES, SMALLER_IS_BETTER, main_of, measure_title
from atoll.ui.run_files import Json, opened, read_tail

AXES = frozenset({"round", "seconds", "simulated_seconds"})
"""Numbers of rows that curves are drawn against only."""
MAX_ROWS = 4000
"""Rows of a run that are sent at once."""
TAIL_BYTES = 1 << 18
"""Bytes at the end of the metrics that `last_rows` looks at."""


class RowLog:
    """The rows of a run, flat and encoded, which takes a tenth of the memory of tables."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.rounds: list[int] = []
        self.names: dict[str, None] = {}
        """Names of all numbers."""
        self._tested: list[bool] = []
        self._file, self._offset = 0, 0

    def extend(self, path: Path) -> bool:
        """Read what was added to the file; False if it is another file, whose rows may differ."""
        try:
            with opened(path) as file:
                status = os.fstat(file.fileno())
                if self._file and (status.st_ino != self._file or status.st_size < self._offset):
                    return False
                self._file = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return not self._file
        data = data[: data.rfind(b"\n") + 1]  # what is being written comes later
        self._offset += len(data)
        for row in parsed_rows(data.decode(errors="replace").splitlines()):
            numbers = flat(row)
            self.names |= dict.fromkeys(numbers)
            self.rounds.append(row["round"])
            self._tested.append("test" in row)
            self.lines.append(json.dumps(numbers, separators=(",", ":")).encode())  # last: others read up to here
        return True

    def chosen(self, most: int, start: int = 0) -> tuple[list[int], int]:
        """Return places of rows from `start` on, every k-th, and k: about `most`, and as many that hold a test."""
        end = len(self.lines)
        every = max(1, math.ceil((end - start) / max(1, most)))
        tests = max(1, math.ceil(sum(self._tested[start:end]) / max(1, most)))
        places, seen = list[int](), 0
        for place in range(start, end):
            seen += self._tested[place]
            if (place - start) % every == 0 or (self._tested[place] and seen % tests == 0) or place == end - 1:
                places.append(place)
        return places, every

    def table(self, most: int) -> Json:
        """Return the rows as columns, thinned; a number that a row lacks is None."""
        places, every = self.chosen(most)
        rows = [json.loads(self.lines[place]) for place in places]
        columns = {name: [row.get(name) for row in rows] for name in self.names}
        return {"columns": columns, "total": len(self.lines), "every": every, "measures": measures_of(self.names)}


def flat(row: Mapping[str, Any], prefix: str = "") -> Json:
    """Return the numbers of a row by dotted names; tables of single clients would be thousands of curves.

    >>> flat({"round": 1, "test": {"accuracy": 0.5, "loss": None}, "detection": {"clients": {"7": {"trust": 1.0}}}})
    {'round': 1, 'test.accuracy': 0.5}
    """
    found: Json = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {} if name == "clients" else flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = value
    return found


def measures_of(names: Iterable[str]) -> list[Json]:
    """Return the curves of numbers beside the axes, with titles; the test's first."""
    names = [name for name in names if name not in AXES]
    main = main_of({name.removeprefix("test."): None for name in names if name.startswith("test.")})

    def figure(name: str) -> str:
        group, _, leaf = name.rpartition(".")
        return main if group.endswith("_test") and leaf not in ("loss", "num_clients") else leaf

    return [
        {
            "key": name,
            "title": measure_title(name),
            "share": figure(name) in SHARES,
            "smaller": figure(name) in SMALLER_IS_BETTER or name.endswith("loss"),
        }
        for name in sorted(names, key=lambda name: (not name.startswith("test."), "_test." not in name))
    ]


def csv_text(rows: Sequence[Json]) -> str:
    """Return rows as CSV, with a column for every number."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row.get(name, "") for name in names] for row in rows)
    return out.getvalue()


def last_rows(path: Path) -> list[Json]:
    """Return the newest rows, newest first."""
    return list(parsed_rows(reversed(read_tail(path, TAIL_BYTES).splitlines())))


def parsed_rows(lines: Iterable[str]) -> Iterator[Json]:
    """Yield the rows of lines; one that is being written is none yet."""
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("round"), int):
                yield row
