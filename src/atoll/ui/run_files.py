"""Files of run directories, which other processes may be writing and other people may have made."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

Json = dict[str, Any]


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written, or None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def opened(path: Path) -> BinaryIO:
    """Open a file of a run; not what a link leads to, which might be anything of this machine, and not a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileNotFoundError(f"{path} is no file")
    return os.fdopen(number, "rb")


def read_bytes(path: Path) -> bytes:
    """Return what a file holds, or nothing if it cannot be read."""
    try:
        with opened(path) as file:
            return file.read()
    except OSError:
        return b""


def read_text(path: Path) -> str:
    """Return the text of a file, or nothing if it cannot be read."""
    return read_bytes(path).decode(errors="replace")


def read_json(path: Path) -> Json | None:
    """Return the JSON object of a file, or None if it holds none."""
    try:
        found = json.loads(read_bytes(path))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_tail(path: Path, num_bytes: int) -> str:
    """Return the last whole lines of a file."""
    try:
        with opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= num_bytes else text.partition("\n")[2]


def is_locked(path: Path) -> bool:
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
