"""The run directory: plan, metrics, checkpoint and results, written so that a kill at any moment loses nothing."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from atoll.commit.finish import without_nan
from atoll.commit.run_state import RunState, encode_state, read_state
from atoll.core.errors import DiskFull, RunError
from atoll.core.messages import State
from atoll.core.plan import Plan
from atoll.core.tensor_file import tensor_file

CHECKPOINT = "checkpoint.safetensors"


class RunDirectory:
    """Where a run writes. Open one with `create` or `reopen`; it is locked until `close`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def create(cls, path: Path, plan: Plan) -> RunDirectory:
        """Start a new run directory; one that holds a run already is refused."""
        if (path / "plan.toml").exists():
            raise RunError(f"{path} holds a run already: continue it with --resume {path}, or choose another --out")
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, _locked(path))
        directory.write_text("plan.toml", plan.to_toml())
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Open the directory of a run that was stopped."""
        if not (path / "plan.toml").exists():
            raise RunError(f"{path} is not a run directory (no plan.toml in it): start one with --out {path}")
        return cls(path, _locked(path))

    def close(self) -> None:
        """Let others use the directory."""
        self._lock.close()

    def plan(self) -> Plan:
        """The plan that the run was started with."""
        return Plan.from_toml((self.path / "plan.toml").read_text())

    def write_text(self, name: str, text: str) -> None:
        """Write a file at once: readers see the old one or the new one."""
        self._write(name, [text.encode()])

    def write_json(self, name: str, data: Any) -> None:
        """Write plain data as JSON, at once."""
        self.write_text(name, json_text(data, indent=1) + "\n")

    def read_json(self, name: str) -> Any:
        """Read plain data, or None if there is no such file."""
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}): restore it, or start again with another --out") from error

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a round to the metrics."""
        self.append("metrics.jsonl", json_text(row))

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the metrics of all rounds, at once."""
        self.write_text("metrics.jsonl", "".join(json_text(row) + "\n" for row in rows))

    def append(self, name: str, line: str) -> None:
        """Add a line to a file."""
        with _explained(self.path), (self.path / name).open("a") as file:
            file.write(line + "\n")

    def log(self, text: str) -> None:
        """Note what happened and when, in `log.txt`; a note that cannot be written stops nothing."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(RunError):
            self.append("log.txt", f"{now} {' '.join(text.split())}")

    def rows(self) -> list[dict[str, Any]]:
        """The metrics written so far; a last line that was cut off is not one."""
        path = self.path / "metrics.jsonl"
        rows: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    def keep_rows(self, version: int) -> list[dict[str, Any]]:
        """Drop the metrics of rounds after a checkpoint, which will be run again, and return the rest."""
        rows = [row for row in self.rows() if row["round"] <= version]
        self.write_rows(rows)
        return rows

    def save(self, state: RunState, identity: str) -> None:
        """Write a checkpoint in place of the last one."""
        self._write(CHECKPOINT, encode_state(state, identity))

    def save_model(self, named: State) -> None:
        """Write a model's tensors by name, for use elsewhere."""
        self._write("model.safetensors", tensor_file(named))

    def load(self, identity: str) -> RunState | None:
        """Read the checkpoint, or None if the run was stopped before its first."""
        path = self.path / CHECKPOINT
        return read_state(path, identity) if path.exists() else None

    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        final, temporary = self.path / name, self.path / f".{name}.new"
        with _explained(self.path):
            with temporary.open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)


def _locked(path: Path) -> IO[str]:
    """Take the directory for this process, not for those that it forks; the lock goes with it, however it ends."""
    file = (path / ".lock").open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunError(f"{path} is in use by another process: wait for it, or choose another --out") from error
    return file


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn a failed write into an error that says what to do; what was there before is still there."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else str(error.strerror)
        raise (DiskFull if full else RunError)(
            f"cannot write to {path}: {what}; make room or fix it, then continue with --resume {path} "
            "(everything up to the last checkpoint is safe)"
        ) from error


def written_plan(path: Path) -> Plan:
    """Return the plan in a run's directory; refuse one that names functions of a script, which only that can find."""
    file = path / "plan.toml"
    if not file.is_file():
        raise RunError(f"{path} is not a run directory (no plan.toml in it): start one with --out {path}")
    plan = Plan.from_toml(file.read_text())
    for field, name in _names(plan.to_dict()):
        module, _, function = name.partition(":")
        if module == "__main__" or "<" in function:
            kind = "data set" if module == "dataset" else "function"
            raise RunError(
                f"the {field} of {path} is {name}, a {kind} of the script that began this run, which cannot be found "
                f"from here: go on in that script with atoll.resume({str(path)!r}, plan); or put a function into a "
                f'module, name it in the plan as {field} = "module:function", and begin anew'
            )
    return plan


def _names(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    """Every `module:function` of a plan, and the field that it stands in."""
    for key, value in table.items():
        field = where if key == "name" else f"{where}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _names(value, field)
        elif isinstance(value, list):
            yield from (pair for each in value if isinstance(each, Mapping) for pair in _names(each, field))
        elif isinstance(value, str) and ":" in value and field:
            yield field, value


def next_free(base: Path, name: str) -> Path:
    """The first of base/name-1, base/name-2, ... that does not exist."""
    number = 1
    while (base / f"{name}-{number}").exists():
        number += 1
    return base / f"{name}-{number}"


def json_text(data: Any, indent: int | None = None) -> str:
    """Write plain data as JSON that every reader takes: null stands for a number that is not finite."""
    return json.dumps(without_nan(data), indent=indent, allow_nan=False)


def plain(value: np.ndarray) -> list[Any]:
    """An array as JSON wants it, with sensible precision."""
    rounded: list[Any] = np.round(value, 6).tolist()
    return rounded
