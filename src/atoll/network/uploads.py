"""What clients send for their tasks, until it is counted: a folder for each attempt and client, a file for each chunk.

Clients do not share chunks: nobody can find out by asking what somebody else has sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from atoll.core.messages import Task
from atoll.network.objects import Manifest, ObjectError, room_in, sync_names, written


class Uploads:
    """The uploads of one run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, task: Task, digest: bytes, data: bytes) -> None:
        """Keep a chunk; the caller has checked that this is its hash."""
        folder = self._folder(task)
        with room_in(self._root):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / digest.hex()
        if not path.exists():
            written(path, folder / f"{digest.hex()}.{os.urandom(4).hex()}", data)

    def num_bytes(self, task: Task) -> int:
        """How many bytes are here of a task."""
        with contextlib.suppress(FileNotFoundError):
            return sum(entry.stat().st_size for entry in os.scandir(self._folder(task)))
        return 0

    def missing(self, task: Task, manifest: Manifest) -> list[bytes]:
        """Which chunks of an object are not here, or have another size than the manifest says."""
        folder, sizes = self._folder(task), dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        return [digest for digest, size in sizes.items() if _size(folder / digest.hex()) != size]

    def settle(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """The chunks of an object, which are all here, and outlive a loss of power from now on."""
        missing = self.missing(task, manifest)
        if missing:
            raise ObjectError(f"{len(missing)} chunks are missing: send them first")
        folder = self._folder(task)
        if manifest.chunks:  # an object of no bytes has no folder
            sync_names(folder)
        return ((folder / digest.hex()).read_bytes() for digest in manifest.chunks)

    def read(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """The chunks of an object, checked against their hashes: disks forget too."""
        for digest in manifest.chunks:
            data = (self._folder(task) / digest.hex()).read_bytes()
            if hashlib.sha256(data).digest() != digest:
                raise ObjectError(f"the file of chunk {digest.hex()} was changed: restore it from a copy")
            yield data

    def drop(self, tasks: tuple[Task, ...]) -> None:
        """Remove what was sent for some tasks."""
        for task in tasks:
            shutil.rmtree(self._folder(task), ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder(task).parent.rmdir()

    def keep_only(self, attempts: set[int]) -> None:
        """Remove what was sent in other attempts than these."""
        for folder in self._root.glob("*"):
            if folder.name not in {str(attempt) for attempt in attempts}:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, task: Task) -> Path:
        return self._root / str(task.attempt) / str(task.client)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
