"""Named bytes, in files of a directory or in an object store such as S3.

Writes are atomic, also under a kill: files are written under a temporary name, synced and renamed; an object store does
this by itself. The bytes of a name never change.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from atoll.core.errors import DiskFull, RunError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

NEW = "new"
"""Folder of partial files."""
SCHEMES = ("s3", "gs", "az")
RETRIES, RETRY_SECONDS = 3, 15
"""How often, and for how many seconds, a request to an object store is retried."""


class StoreAway(DiskFull):
    """The object store is unavailable: nothing was written, and a retry may succeed."""


class Blobs(ABC):
    """Bytes by names such as `chunks/ab01`; FileNotFoundError for a name that does not exist."""

    @abstractmethod
    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Write the concatenation of parts; the bytes are durable on return, and their name after `sync`."""

    @abstractmethod
    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""

    @abstractmethod
    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read the bytes of a name, or a range of them."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a name; -1 if it does not exist."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all names below a folder, relative to it."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete names, whether they exist or not."""

    @abstractmethod
    def clear(self, folder: str) -> None:
        """Delete all names in a folder."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove partial files of a killed process; no other process may be writing."""


MakeBlobs = Callable[[str, str], Blobs]
"""(run, kind) -> the blobs in which a run keeps data of this kind."""


@final
class Disk(Blobs):
    """Files of a directory; without `durable` they survive a kill, but perhaps not a loss of power."""

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self._root, self._durable = root, durable
        with disk_errors(root):
            (root / NEW).mkdir(parents=True, exist_ok=True)

    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Write a file atomically."""
        path, beside = self._root / name, self._root / NEW / secrets.token_hex(8)
        try:
            write_file(path, beside, *parts, sync=self._durable)
        except FileNotFoundError:  # the first of its folder
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, beside, *parts, sync=self._durable)

    def sync(self, folder: str) -> None:
        """Sync the directory and its parent."""
        if not self._durable:
            return
        with contextlib.suppress(FileNotFoundError):  # nothing was written there
            sync_directory(self._root / folder)
            sync_directory(self._root)

    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read a file."""
        with open(self._root / name, "rb") as file:
            file.seek(start)
            return file.read(size)

    def size(self, name: str) -> int:
        """Return the size of a file."""
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return -1

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all files below a folder."""
        return dict(_files(self._root / folder, "", ("" if folder else NEW)))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, and folders that this empties."""
        folders = set()
        for name in names:
            path = self._root / name
            path.unlink(missing_ok=True)
            folders.add(path.parent)
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def clear(self, folder: str) -> None:
        """Remove a folder."""
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove partial files."""
        for left in (self._root / NEW).iterdir():
            left.unlink(missing_ok=True)


@final
class Bucket(Blobs):
    """Objects of an object store under one prefix."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Upload an object; the store answers once it is durable."""
        with _served():
            self._store.put(self._path(name), parts[0] if len(parts) == 1 else b"".join(parts))

    def sync(self, folder: str) -> None:
        """Do nothing: an uploaded object is durable."""

    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Download an object, or a range of it."""
        with _served():
            if size is None:
                return bytes(self._store.get(self._path(name)).bytes())[start:]
            return bytes(self._store.get_range(self._path(name), start=start, length=size))

    def size(self, name: str) -> int:
        """Return the size of an object."""
        try:
            with _served():
                return int(self._store.head(self._path(name))["size"])
        except FileNotFoundError:
            return -1

    def sizes(self, folder: str) -> dict[str, int]:
        """List the objects under a folder."""
        start = len(self._path(folder)) + 1
        with _served():
            return {
                each["path"][start:]: each["size"] for some in self._store.list(self._path(folder)) for each in some
            }

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        paths = [self._path(name) for name in names]
        if paths:
            with _served(), contextlib.suppress(FileNotFoundError):
                self._store.delete(paths)

    def clear(self, folder: str) -> None:
        """Delete the objects under a folder."""
        self.delete([f"{folder}/{name}" for name in self.sizes(folder)])

    def sweep(self) -> None:
        """Do nothing: uploads are atomic."""

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else self._prefix


def blobs_at(home: Path, url: str | None = None) -> MakeBlobs:
    """Return where a server keeps objects: in its home, in another directory, or in the object store of a URL."""
    scheme, found, rest = (url or "").partition("://")
    if url is None or not found or scheme == "file":
        root = home / "runs" if url is None else Path(rest if found else url)
        return lambda run, kind: Disk(root / run / kind)
    if scheme not in SCHEMES:
        raise RunError(f"--objects is a directory or one of {', '.join(f'{s}://' for s in SCHEMES)}, got {url!r}")
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise RunError(f"--objects {scheme}:// needs the package obstore: pip install 'atoll[objects]'") from error
    retry: Any = {"max_retries": RETRIES, "retry_timeout": datetime.timedelta(seconds=RETRY_SECONDS)}
    with _served():
        store = from_url(url, retry_config=retry)
        next(iter(store.list("atoll")), None)  # fail now if it is unavailable
    return lambda run, kind: Bucket(store, f"{run}/{kind}")


@contextlib.contextmanager
def _served() -> Iterator[None]:
    """Turn errors of an object store into StoreAway."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise StoreAway(f"the object store of --objects does not serve ({why}); it goes on when that passes") from error


def open_private(path: str | Path, flags: int) -> int:
    """Open a file that only its owner can read, whatever the umask; for `open(opener=...)`."""
    number = os.open(path, flags, 0o600)
    os.fchmod(number, 0o600)  # an existing file may have been readable by others
    return number


def write_file(path: Path, beside: Path, *parts: bytes | memoryview, sync: bool = True) -> None:
    """Write a private file atomically: under a temporary name beside it, synced, then renamed."""
    try:
        with disk_errors(path.parent):
            with open(beside, "wb", opener=open_private) as file:
                file.writelines(parts)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            beside.rename(path)
    except (OSError, DiskFull):
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of a full disk into DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no room is left in {folder}: free some, and it goes on by itself") from error
        raise


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that the names in it survive a loss of power."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _files(folder: Path, before: str, skipped: str) -> Iterator[tuple[str, int]]:
    """Yield the files below a folder with their sizes; concurrent deletions may or may not be seen."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.is_dir():
                if entry.name != skipped:
                    yield from _files(Path(entry.path), f"{before}{entry.name}/", "")
            else:
                yield f"{before}{entry.name}", entry.stat().st_size
