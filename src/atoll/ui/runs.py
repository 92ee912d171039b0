"""Readers of a directory of runs for the live page: summaries, curves and documents, also while they are written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atoll.core.errors import RunError
from atoll.report.main_figure import main_of
from atoll.ui.rows import RowLog, last_rows
from atoll.ui.run_files import Json, is_locked, read_bytes, read_json, read_tail, read_text, stamp_of

PLAN, INFO, ROWS, RESULT, LEDGER = "plan.toml", "run.json", "metrics.jsonl", "result.json", "ledger.jsonl"
DOCUMENTS = ("sites", "clients", "confusion", "partition", "charts", "answers")
"""Files of JSON that a run may have beside those above."""
SHOWN = frozenset({PLAN, INFO, ROWS, RESULT, LEDGER, "log.txt", *(f"{name}.json" for name in DOCUMENTS)})
"""Files that are handed out, beside pages; not checkpoints, models and privacy ledgers, which hold secrets."""
DEPTH = 5
"""How deep below the directory runs are looked for."""
LOG_BYTES = 200_000
"""Bytes at the end of a log that are shown."""


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
        last = last_rows(path / ROWS)
        result = read_json(path / RESULT)
        return {
            "summary": summary,
            "plan": read_text(path / PLAN),
            "info": read_json(path / INFO),
            "result": result,
            **{name: read_json(path / f"{name}.json") for name in DOCUMENTS},
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
        return read_tail(self.path(run) / "log.txt", LOG_BYTES)

    def ledger(self, run: str) -> list[str]:
        """Return the lines of a run's ledger; none if it has no ledger."""
        return read_text(self.path(run) / LEDGER).splitlines()

    def file(self, run: str, name: str) -> bytes:
        """Return the contents of a file that is handed out."""
        found = next((each for each in _shown_files(self.path(run)) if each.name == name), None)
        if found is None:
            raise RunError(f"there is no file {name!r:.80} of this run that is shown: choose one of its list")
        return read_bytes(found)

    def stamps(self, run: str) -> dict[str, object]:
        """Return what changes with the documents of a run, by the name of the file."""
        path = self.path(run)
        names = [INFO, RESULT, LEDGER, "log.txt", *(f"{name}.json" for name in DOCUMENTS)]
        return {name: stamp for name in names if (stamp := stamp_of(path / name)) is not None}

    def _summary(self, run: str, path: Path, state: Status | None) -> Json:
        stamp = tuple(stamp_of(path / name) for name in (PLAN, INFO, ROWS, RESULT))
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
        status = "ended" if facts["reason"] else "running" if is_locked(path / ".lock") else "stopped"
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
    rows, info, result = last_rows(path / ROWS), read_json(path / INFO) or {}, read_json(path / RESULT)
    last = rows[0] if rows else {}
    test: Json = next((row["test"] for row in rows if row.get("test")), {})
    budget = (info.get("privacy") or {}).get("budget")
    spent = next((row["privacy"] for row in rows if "privacy" in row), None)
    privacy = {"epsilon": spent["epsilon"], "delta": spent.get("delta"), "budget": budget} if spent else None
    return {
        **_planned(run, read_text(path / PLAN)),
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
