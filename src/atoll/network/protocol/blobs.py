"""Where large things lie by name: files in a directory, or an object store such as S3.

A name stands for whole bytes, whatever is killed when: files are written beside their place, synced and then renamed;
an object store does that by itself. What a name stands for is never changed.
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
"""Where a directory keeps what is half written."""
SCHEMES = ("s3", "gs", "az")
RETRIES, RETRY_SECONDS = 3, 15
"""How often, and for how long, a request to an object store is made again before somebody else must wait."""


class StoreAway(DiskFull):
    """The object store does not serve: nothing was written, and it can be tried again."""


class Blobs(ABC):
    """Bytes by names such as `chunks/ab01`; of a name that is not there, FileNotFoundError."""

    @abstractmethod
    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Keep bytes, one part after another: when this returns they are written, and after `sync` so is their name."""

    @abstractmethod
    def sync(self, folder: str) -> None:
        """Make sure that the names in a folder outlive a loss of power."""

    @abstractmethod
    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """The bytes of a name, or some of them."""

    @abstractmethod
    def size(self, name: str) -> int:
        """How many bytes there are of a name; -1 if it is not there."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """The names in a folder, however deep, without the folder's own, and how many bytes there are of each."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Forget these names, those that are not there too."""

    @abstractmethod
    def clear(self, folder: str) -> None:
        """Forget all names in a folder."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what a process that was killed left half written; nobody else may be writing."""


MakeBlobs = Callable[[str, str], Blobs]
"""(run, kind) -> where the run keeps what is of this kind."""


@final
class Disk(Blobs):
    """Files of a directory; what can be had again need not be `durable`: it outlives a kill, not a loss of power."""

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self._root, self._durable = root, durable
        with disk_errors(root):
            (root / NEW).mkdir(parents=True, exist_ok=True)

    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Write a file beside its place, and put it there."""
        path, beside = self._root / name, self._root / NEW / secrets.token_hex(8)
        try:
            write_file(path, beside, *parts, sync=self._durable)
        except FileNotFoundError:  # the first of its folder
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, beside, *parts, sync=self._durable)

    def sync(self, folder: str) -> None:
        """Sync the directory, and the one that holds its name."""
        if not self._durable:
            return
        with contextlib.suppress(FileNotFoundError):  # nothing was put there
            sync_directory(self._root / folder)
            sync_directory(self._root)

    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read a file."""
        with open(self._root / name, "rb") as file:
            file.seek(start)
            return file.read(size)

    def size(self, name: str) -> int:
        """Look at a file."""
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return -1

    def sizes(self, folder: str) -> dict[str, int]:
        """Look at all files of a folder."""
        return dict(_files(self._root / folder, "", ("" if folder else NEW)))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, and folders that are empty then."""
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
        """Remove what is half written."""
        for left in (self._root / NEW).iterdir():
            left.unlink(missing_ok=True)


@final
class Bucket(Blobs):
    """Objects of a store, all under one prefix."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Send it; the store answers when it is safe."""
        with _served():
            self._store.put(self._path(name), parts[0] if len(parts) == 1 else b"".join(parts))

    def sync(self, folder: str) -> None:
        """Names are safe as soon as they are there."""

    def get(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Fetch it."""
        with _served():
            if size is None:
                return bytes(self._store.get(self._path(name)).bytes())[start:]
            return bytes(self._store.get_range(self._path(name), start=start, length=size))

    def size(self, name: str) -> int:
        """Ask for it."""
        try:
            with _served():
                return int(self._store.head(self._path(name))["size"])
        except FileNotFoundError:
            return -1

    def sizes(self, folder: str) -> dict[str, int]:
        """List them."""
        start = len(self._path(folder)) + 1
        with _served():
            return {
                each["path"][start:]: each["size"] for some in self._store.list(self._path(folder)) for each in some
            }

    def delete(self, names: Iterable[str]) -> None:
        """Delete them."""
        paths = [self._path(name) for name in names]
        if paths:
            with _served(), contextlib.suppress(FileNotFoundError):
                self._store.delete(paths)

    def clear(self, folder: str) -> None:
        """List and delete them."""
        self.delete([f"{folder}/{name}" for name in self.sizes(folder)])

    def sweep(self) -> None:
        """Nothing is ever half written."""

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else self._prefix


def blobs_at(home: Path, url: str | None = None) -> MakeBlobs:
    """Where a server keeps what is large: in its home, in another directory, or in the object store of a URL."""
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
        next(iter(store.list("atoll")), None)  # say at once if it does not serve
    return lambda run, kind: Bucket(store, f"{run}/{kind}")


@contextlib.contextmanager
def _served() -> Iterator[None]:
    """Say so where an object store does not do what it is asked."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise StoreAway(f"the object store of --objects does not serve ({why}); it goes on when that passes") from error


def open_private(path: str | Path, flags: int) -> int:
    """Open a file that only its owner can read, whatever the umask and its directory allow; for `open(opener=...)`."""
    number = os.open(path, flags, 0o600)
    os.fchmod(number, 0o600)  # one that was there may have been open to others
    return number


def write_file(path: Path, beside: Path, *parts: bytes | memoryview, sync: bool = True) -> None:
    """Write a private file beside its place, sync it and rename it: at no moment is there half a file of its name."""
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
    """Say so where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no room is left in {folder}: free some, and it goes on by itself") from error
        raise


def sync_directory(directory: Path) -> None:
    """Make sure that names in a directory outlive a loss of power."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _files(folder: Path, before: str, skipped: str) -> Iterator[tuple[str, int]]:
    """The files of a folder and of those in it, and their sizes; what goes meanwhile may be among them or not."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.is_dir():
                if entry.name != skipped:
                    yield from _files(Path(entry.path), f"{before}{entry.name}/", "")
            else:
                yield f"{before}{entry.name}", entry.stat().st_size
