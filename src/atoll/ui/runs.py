"""Readers of a directory of runs for the live page: summaries, curves and documents, also while they are written."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import math
import os
import stat
import struct
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from atoll.core.errors import RunError
from atoll.report.main_figure import SHARES, SMALLER_IS_BETTER, main_of, measure_title

Json = dict[str, Any]
PLAN, INFO, ROWS, RESULT, LEDGER = "plan.toml", "run.json", "metrics.jsonl", "result.json", "ledger.jsonl"
DOCUMENTS = ("sites", "clients", "confusion", "partition", "charts", "answers")
"""Files of JSON that a run may have beside those above."""
SHOWN = frozenset({PLAN, INFO, ROWS, RESULT, LEDGER, "log.txt", *(f"{name}.json" for name in DOCUMENTS)})
"""Files that are handed out, beside pages; not checkpoints, models and privacy ledgers, which hold secrets."""
DEPTH = 5
"""How deep below the directory runs are looked for."""
TAIL_BYTES, LOG_BYTES = 1 << 18, 200_000
"""Bytes at the end of the metrics that a summary looks at, and of the log that are shown."""
AXES = frozenset({"round", "seconds", "simulated_seconds"})
"""Numbers of rows that curves are drawn against only."""
MAX_ROWS = 4000
"""Rows of a run that are sent at once."""


class Status(NamedTuple):
    """What the process of a run knows of it beyond its files."""

    status: str
    """As in a summary: running, waiting, ended or stopped."""
    live: Json | None = None
    plan: str = ""
    """The plan's text, for runs that have no directory yet."""


class Live(Protocol):
    """Where states come from that are in no file."""

    def states(self) -> Mapping[str, Status]:
        """Return the states of runs by id; runs that are not named are other processes'."""


class NoLive:
    """Runs of other processes, of which files alone are known."""

    def states(self) -> Mapping[str, Status]:
        """Return nothing."""
        return {}


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
            with _opened(path) as file:
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
        for row in _rows(data.decode(errors="replace").splitlines()):
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


class RunsDirectory:
    """All runs below a directory. What is read is kept until its file changes; may be used from any thread."""

    def __init__(self, root: Path, live: Live | None = None) -> None:
        self.root, self._live = root, live or NoLive()
        self._paths: dict[str, Path] = {}
        self._facts: dict[str, tuple[object, Json]] = {}
        self._rows: dict[str, RowLog] = {}
        self._lock = threading.Lock()

    def summaries(self) -> dict[str, Json]:
        """Look for runs, and return the summaries of all by id."""
        states = self._live.states()
        self._paths = paths = dict(_runs_below(self.root))
        known = {name: self._summary(name, path, states.get(name)) for name, path in paths.items()}
        for name in states.keys() - paths.keys():
            known[name] = _first_summary(name, states[name])
        for name in self._facts.keys() - paths.keys():
            self._facts.pop(name, None)
        return known

    def path(self, run: str) -> Path:
        """Return the directory of a run; only ids that were found are known, so that none leads elsewhere."""
        path = self._paths.get(run) or dict(_runs_below(self.root)).get(run)
        if path is None:
            raise RunError(f"there is no run {run!r:.80} here: go back to the list of runs")
        return path

    def document(self, run: str, summary: Json) -> Json:
        """Return all that is shown of a run but its curves, ledger and log."""
        path = self.path(run)
        last = _last_rows(path / ROWS)
        result = _json(path / RESULT)
        return {
            "summary": summary,
            "plan": _text(path / PLAN),
            "info": _json(path / INFO),
            "result": result,
            **{name: _json(path / f"{name}.json") for name in DOCUMENTS},
            "detection": next((row["detection"] for row in last if "detection" in row), None),
            "contribution": next(
                (row["contribution"] for row in last if "contribution" in row), (result or {}).get("contribution")
            ),
            "files": [{"name": each.name, "bytes": each.stat().st_size} for each in sorted(_shown_files(path))],
            "pages": sorted(each.name for each in _shown_files(path) if each.suffix == ".html"),
        }

    def rows(self, run: str) -> RowLog:
        """Return the rows of a run as they are now: the log of the last call with more rows, or another log."""
        path = self.path(run) / ROWS
        with self._lock:
            log = self._rows.get(run)
            if log is None or not log.extend(path):
                log = self._rows[run] = RowLog()
                log.extend(path)
            return log

    def followed(self) -> dict[str, RowLog]:
        """Return the logs that are in memory, by run."""
        with self._lock:
            return dict(self._rows)

    def forget_rows(self, runs: Iterable[str]) -> None:
        """Free the memory of rows that no page follows any more."""
        with self._lock:
            for run in runs:
                self._rows.pop(run, None)

    def log(self, run: str) -> str:
        """Return the end of a run's log."""
        return _tail(self.path(run) / "log.txt", LOG_BYTES)

    def ledger(self, run: str) -> list[str]:
        """Return the lines of a run's ledger; none if it has no ledger."""
        return _text(self.path(run) / LEDGER).splitlines()

    def file(self, run: str, name: str) -> bytes:
        """Return the contents of a file that is handed out."""
        found = next((each for each in _shown_files(self.path(run)) if each.name == name), None)
        if found is None:
            raise RunError(f"there is no file {name!r:.80} of this run that is shown: choose one of its list")
        return _read(found)

    def stamps(self, run: str) -> dict[str, object]:
        """Return what changes with the documents of a run, by the name of the file."""
        path = self.path(run)
        names = [INFO, RESULT, LEDGER, "log.txt", *(f"{name}.json" for name in DOCUMENTS)]
        return {name: stamp for name in names if (stamp := _stamp(path / name)) is not None}

    def _summary(self, run: str, path: Path, state: Status | None) -> Json:
        stamp = tuple(_stamp(path / name) for name in (PLAN, INFO, ROWS, RESULT))
        known = self._facts.get(run)
        if known is None or known[0] != stamp:
            try:
                known = (stamp, _facts(run, path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                known = (stamp, {**EMPTY, "id": run, "name": run, "problem": f"{type(error).__name__}: {error}"})
            self._facts[run] = known
        facts = known[1]
        if state is not None:
            return {**facts, "status": state.status, "live": state.live}
        status = "ended" if facts["reason"] else "running" if _is_locked(path / ".lock") else "stopped"
        return {**facts, "status": status}


EMPTY: Json = {
    "id": "",
    "name": "",
    "status": "stopped",
    "reason": None,
    "round": 0,
    "rounds": 0,
    "started": None,
    "seconds": None,
    "simulated_seconds": None,
    "algorithm": "",
    "model": "",
    "data": "",
    "seed": 0,
    "group": "",
    "num_clients": None,
    "main": "",
    "test": {},
    "train_loss": None,
    "clients_test": None,
    "bytes_up": None,
    "bytes_down": None,
    "privacy": None,
    "budgets": {},
    "live": None,
    "problem": None,
}
"""A summary of which nothing is known."""


def _facts(run: str, path: Path) -> Json:
    """Read the summary of a run from its files."""
    rows, info, result = _last_rows(path / ROWS), _json(path / INFO) or {}, _json(path / RESULT)
    last = rows[0] if rows else {}
    test: Json = next((row["test"] for row in rows if row.get("test")), {})
    budget = (info.get("privacy") or {}).get("budget")
    spent = next((row["privacy"] for row in rows if "privacy" in row), None)
    privacy = {"epsilon": spent["epsilon"], "delta": spent.get("delta"), "budget": budget} if spent else None
    return {
        **_planned(run, _text(path / PLAN)),
        "reason": result["reason"] if result else None,
        "round": last.get("round", 0),
        "started": info.get("started"),
        "num_clients": info.get("num_clients"),
        "main": main_of(test),
        "test": test,
        "clients_test": next((row["clients_test"] for row in rows if "clients_test" in row), None),
        "privacy": privacy,
        **{name: last.get(name) for name in ("seconds", "simulated_seconds", "train_loss", "bytes_up", "bytes_down")},
    }


def _first_summary(run: str, state: Status) -> Json:
    """Return the summary of a run that has no files yet."""
    try:
        planned = _planned(run, state.plan)
    except ValueError:
        planned = {**EMPTY, "id": run, "name": run}
    return {**planned, "status": state.status, "live": state.live}


def _planned(run: str, text: str) -> Json:
    """Return what a plan says of a run, without building it."""
    plan = tomllib.loads(text)
    stop = plan.get("stop", {})
    parts = {name: _part(plan.get(name, {})) for name in ("algorithm", "model", "data")}
    same = {key: value for key, value in plan.items() if key not in ("seed", "name")}
    return {
        **EMPTY,
        "id": run,
        "name": plan.get("name") or run,
        "rounds": plan.get("rounds", 0),
        "seed": plan.get("seed", 0),
        "group": hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "budgets": {name: stop.get(name) for name in ("bytes", "seconds", "simulated_seconds")},
        **parts,
    }


def _part(value: Any) -> str:
    return str(value.get("name", "")) if isinstance(value, dict) else str(value)


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


def _runs_below(root: Path, prefix: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Path]]:
    """Yield ids and directories of runs; a directory of a run holds no others."""
    if not prefix and _is_run(root):
        yield root.resolve().name, root
        return
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            name, path = f"{prefix}{entry.name}", root / entry.name
            if _is_run(path):
                yield name, path
            elif depth > 1:
                yield from _runs_below(path, f"{name}/", depth - 1)


def _is_run(path: Path) -> bool:
    """Return whether a run has begun here; a plan alone may be anybody's."""
    return (path / PLAN).is_file() and any((path / name).exists() for name in (INFO, ROWS, ".lock"))


def _shown_files(path: Path) -> list[Path]:
    shown = (each for each in path.iterdir() if each.name in SHOWN or each.suffix == ".html")
    return [each for each in shown if each.is_file() and not each.is_symlink()]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _opened(path: Path) -> BinaryIO:
    """Open a file of a run; not what a link leads to, which might be anything of this machine, and not a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileNotFoundError(f"{path} is no file")
    return os.fdopen(number, "rb")


def _read(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            return file.read()
    except OSError:
        return b""


def _text(path: Path) -> str:
    return _read(path).decode(errors="replace")


def _json(path: Path) -> Json | None:
    try:
        found = json.loads(_read(path))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _tail(path: Path, num_bytes: int) -> str:
    """Return the last whole lines of a file."""
    try:
        with _opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= num_bytes else text.partition("\n")[2]


def _last_rows(path: Path) -> list[Json]:
    """Return the newest rows, newest first."""
    return list(_rows(reversed(_tail(path, TAIL_BYTES).splitlines())))


def _rows(lines: Iterable[str]) -> Iterator[Json]:
    """Yield the rows of lines; one that is being written is none yet."""
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("round"), int):
                yield row


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a run, without taking it."""
    form, kind = ("@qqihh", 3) if sys.platform == "darwin" else ("@hhqqi", 0)  # struct flock
    fields = [0] * 5
    fields[kind] = fcntl.F_WRLCK
    try:
        with path.open("rb") as file:
            answer = struct.unpack(form, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *fields)))
    except OSError:
        return False
    return bool(answer[kind] != fcntl.F_UNLCK)
