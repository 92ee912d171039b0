"""Files that are written once: there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

TEMPORARY = ".{}.new"
"""What a file is called while it is written."""


def try_writing(directory: Path) -> None:
    """Write a file without a name to a directory; OSError says why that does not work."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"x")


def write_once(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file under a temporary name and rename it; FileExistsError if there is one, or one being written.

    The temporary file keeps others with the same path out, so that none of them replaces a file.
    """
    temporary = path.with_name(TEMPORARY.format(path.name))
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(number, "wb") as file:
            if os.path.lexists(path):
                raise FileExistsError(f"{path} exists")
            file.write(data)
            file.flush()
            os.fsync(number)
        temporary.rename(path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
