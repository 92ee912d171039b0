"""What clients send for their tasks, until it is counted: a folder for each attempt and client, a blob for each chunk.

Clients do not share chunks: nobody can find out by asking what somebody else has sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from atoll.core.messages import Task
from atoll.network.blobs import Blobs
from atoll.network.objects import Manifest, ObjectError


class Uploads:
    """The uploads of one run."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._totals: dict[str, int] = {}

    def put(self, task: Task, digest: bytes, data: bytes) -> None:
        """Keep a chunk; the caller has checked that this is its hash."""
        name = f"{_folder(task)}/{digest.hex()}"
        if self._blobs.size(name) < 0:
            before = self.num_bytes(task)
            self._blobs.put(name, data)
            self._totals[_folder(task)] = before + len(data)

    def num_bytes(self, task: Task) -> int:
        """How many bytes are here of a task."""
        folder = _folder(task)
        if folder not in self._totals:
            self._totals[folder] = sum(self._blobs.sizes(folder).values())
        return self._totals[folder]

    def missing(self, task: Task, manifest: Manifest) -> list[bytes]:
        """Which chunks of an object are not here, or have another size than the manifest says."""
        here = self._blobs.sizes(_folder(task))
        sizes = dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        return [digest for digest, size in sizes.items() if here.get(digest.hex()) != size]

    def settle(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """The chunks of an object, which are all here, and outlive a loss of power from now on."""
        missing = self.missing(task, manifest)
        if missing:
            raise ObjectError(f"{len(missing)} chunks are missing: send them first")
        self._blobs.sync(_folder(task))
        return (self._blobs.get(f"{_folder(task)}/{digest.hex()}") for digest in manifest.chunks)

    def read(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """The chunks of an object, checked against their hashes: disks forget too."""
        for digest in manifest.chunks:
            data = self._blobs.get(f"{_folder(task)}/{digest.hex()}")
            if hashlib.sha256(data).digest() != digest:
                raise ObjectError(f"chunk {digest.hex()} of an upload was changed: restore it from a copy")
            yield data

    def drop(self, tasks: tuple[Task, ...]) -> None:
        """Remove what was sent for some tasks."""
        for task in tasks:
            self._blobs.clear(_folder(task))
            self._totals.pop(_folder(task), None)

    def keep_only(self, attempts: set[int]) -> None:
        """Remove what was sent in other attempts than these."""
        there = {name.split("/")[0] for name in self._blobs.sizes("")}
        for attempt in there - {str(attempt) for attempt in attempts}:
            self._blobs.clear(attempt)
        self._totals.clear()


def _folder(task: Task) -> str:
    return f"{task.attempt}/{task.client}"
