"""The folder through which parties exchange files; others can write to it, so nothing in it is trusted."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from atoll.alignment.curve import AlignmentError
from atoll.alignment.envelope import STOPPED, Way, file_name, way_of
from atoll.alignment.files import TEMPORARY, try_writing, write_once
from atoll.core.errors import DataError


class Stamp(NamedTuple):
    """What changes when a file is written."""

    size: int
    written: int
    inode: int


class Folder:
    """Files of parties in a directory that they share; names are made of parties' names that are known, never read."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise DataError(f"{path} is no directory: make it, or mount the share that the parties use")
        try:
            try_writing(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written to ({error.strerror}), and each party writes its files there: make room, or "
                "mount the share for writing"
            ) from error
        self.path = path

    def leftovers(self, me: str, asker: str) -> list[str]:
        """Return files that cannot be of a session which this party is only about to begin.

        The first message of the asking party to this one is all that may be there.
        """
        first = file_name(Way(asker, me, 1))  # none has this name at the asking party, which is no receiver of its own
        return sorted(name for name in os.listdir(self.path) if _concerns(name, me) and name != first)

    def stamp(self, way: Way, most: int) -> Stamp | None:
        """Return the stamp of a file; None if there is none. Refuse what is no file, and one of more bytes than due."""
        name = file_name(way)
        try:
            status = os.lstat(self.path / name)
        except FileNotFoundError:
            if not self.path.is_dir():  # a share that is away for a while
                raise
            return None
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise AlignmentError(
                f"{name} of {way.sender} in {self.path} is {kind}, and only regular files are read: find out who put "
                "it there, and begin anew in an empty folder"
            )
        if status.st_size > most:
            raise AlignmentError(
                f"{name} of {way.sender} in {self.path} takes {status.st_size:,} bytes, at most {most:,} are due by "
                "the number of ids: find out who put it there, and begin anew in an empty folder"
            )
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def read(self, way: Way, size: int) -> bytes:
        """Return at most so many bytes of a file; OSError for a link, and for a file that is not there any more."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(self.path / file_name(way), flags), "rb") as file:
            return file.read(size) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""

    def write(self, way: Way, data: bytes) -> None:
        """Write a new file; a file of that name is an error."""
        name = file_name(way)
        try:
            write_once(self.path / name, data)
        except FileExistsError as error:
            raise AlignmentError(
                f"{name} is in {self.path} before {way.sender} wrote it, so that somebody else writes under this name: "
                "run one process of each party, and begin anew in an empty folder"
            ) from error
        except OSError as error:
            raise DataError(
                f"{name} cannot be written to {self.path} ({error.strerror}): make room or mount the share again, and "
                "begin anew in an empty folder"
            ) from error

    def stop(self, who: str) -> None:
        """Say that a party has ended the session before its end; this is not worth an error of its own."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.path / (who + STOPPED), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))

    def has_stopped(self, who: str) -> bool:
        """Return whether a party has ended the session before its end."""
        return os.path.lexists(self.path / (who + STOPPED))


def _concerns(name: str, me: str) -> bool:
    """Return whether a file is of this party or for it, or ends a session; also one of its own, half written."""
    before, after = TEMPORARY.split("{}")
    half = name.startswith(before) and name.endswith(after)
    way = way_of(name[len(before) : -len(after)] if half else name)
    if way is None:
        return name.endswith(STOPPED)
    return way.sender == me or (way.receiver == me and not half)
