"""Updates of clients until they are counted.

Large updates arrive in chunks: a folder for each attempt, a blob for each chunk of a client. Clients do not share
chunks, so that none can find out what another has sent. Small updates arrive in one request, and those that arrive
together are written to one file, a pack. An index in memory suffices, as no other process writes here.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atoll.core.errors import AtollError
from atoll.core.messages import Task
from atoll.network.protocol.blobs import Blobs
from atoll.network.protocol.objects import CHUNK, Manifest, ObjectError
from atoll.network.server.tables import TaskRow

PACKS = "packs"
NAME = re.compile(r"([0-9]+)/([0-9]+)-([0-9a-f]{64})")
MAX_SHORT_CHUNKS = 16
"""Maximum number of chunks of a client that are shorter than CHUNK: each object has one, and each is a file."""
Key = tuple[int, int]
"""Attempt and client."""


class UploadTooLarge(AtollError):
    """More bytes or chunks than are kept of a client."""


class PackPosition(NamedTuple):
    """Where an update begins in a pack."""

    pack: str
    start: int


def position_of(row: TaskRow) -> PackPosition | None:
    """Return where an update lies in a pack of small updates; None if it was sent in chunks."""
    return PackPosition(*row.report["spot"]) if "spot" in row.report else None


class Uploads:
    """The uploads of one run."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._sizes: dict[Key, dict[bytes, int]] = {}
        self._packs: dict[str, set[Key]] = {}
        self._counting = threading.Lock()
        self._being_written: dict[int, list[int]] = {}
        """Sizes of chunks that are being written, by client."""
        for name, size in blobs.sizes("").items():
            if found := NAME.fullmatch(name):
                self._sizes.setdefault((int(found[1]), int(found[2])), {})[bytes.fromhex(found[3])] = size

    def put_chunk(self, task: Task, digest: bytes, data: bytes, most: int) -> None:
        """Store a chunk of a client, of which at most `most` bytes are kept; the caller has checked the hash."""
        if self._stored(task).get(digest) == len(data):
            return
        with self._counting:  # a client may send several requests at once
            sizes = [*self.stored_sizes(task.client), *self._being_written.get(task.client, ()), len(data)]
            short = sum(size < CHUNK for size in sizes)
            if sum(sizes) > most:
                raise UploadTooLarge(
                    f"more was sent for this task than an update can be: at most {most:,} bytes are kept"
                )
            if not data or short > MAX_SHORT_CHUNKS:
                raise UploadTooLarge(
                    f"a chunk has {CHUNK:,} bytes, but the last of an object: {short} shorter ones were sent"
                )
            self._being_written.setdefault(task.client, []).append(len(data))
        try:
            self._blobs.put(_path(_key(task), digest), data)
            self._sizes.setdefault(_key(task), {})[digest] = len(data)
        finally:
            with self._counting:
                self._being_written[task.client].remove(len(data))

    def stored_sizes(self, client: int) -> list[int]:
        """Return the sizes of all stored chunks of a client."""
        return [size for key, sizes in list(self._sizes.items()) if key[1] == client for size in list(sizes.values())]

    def put_pack(self, name: str, tasks: Iterable[Task], parts: list[bytes]) -> None:
        """Write a pack; it is durable on return."""
        self._packs[name] = set(map(_key, tasks))
        self._blobs.put(f"{PACKS}/{name}", *parts)
        self._blobs.sync(PACKS)

    def restore(self, task: Task, position: PackPosition) -> None:
        """Note after a restart that an update is still needed."""
        self._packs.setdefault(position.pack, set()).add(_key(task))

    def missing(self, task: Task, manifest: Manifest) -> list[bytes]:
        """Return the chunks of an object that are not stored, or not in the size of the manifest."""
        stored = self._stored(task)
        sizes = dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        return [digest for digest, size in sizes.items() if stored.get(digest) != size]

    def complete_chunks(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """Read the chunks of an object; ObjectError if some are missing."""
        missing = self.missing(task, manifest)
        if missing:
            raise ObjectError(f"{len(missing)} chunks are missing: send them first")
        return (self._blobs.get(_path(_key(task), digest)) for digest in manifest.chunks)

    def sync(self, attempt: int) -> None:
        """Make the chunks of an attempt durable."""
        self._blobs.sync(str(attempt))

    def read(self, task: Task, manifest: Manifest, position: PackPosition | None = None) -> Iterator[bytes]:
        """Read the chunks of an object, and check their hashes against damage on disk."""
        for digest in manifest.chunks:
            if position is None:
                data = self._blobs.get(_path(_key(task), digest))
            else:
                data = self._blobs.get(f"{PACKS}/{position.pack}", position.start, manifest.num_bytes)
            if hashlib.sha256(data).digest() != digest:
                raise ObjectError(f"chunk {digest.hex()} of an upload was changed: restore it from a copy")
            yield data

    def drop_tasks(self, tasks: Iterable[Task]) -> None:
        """Remove the updates of tasks."""
        gone = set(map(_key, tasks))
        names = [_path(key, digest) for key in gone for digest in self._sizes.pop(key, {})]
        self._blobs.delete([*names, *self._unneeded_packs(gone)])

    def drop_other_tasks(self, client: int, tasks: Iterable[Task]) -> None:
        """Remove what a client sent for other tasks."""
        kept = set(map(_key, tasks))
        gone = [key for key in list(self._sizes) if key[1] == client and key not in kept]
        self._blobs.delete([_path(key, digest) for key in gone for digest in self._sizes.pop(key, {})])

    def drop_other_attempts(self, attempts: set[int]) -> None:
        """Remove what was sent in other attempts."""
        there = self._blobs.sizes("")
        for attempt in {name.split("/")[0] for name in there} - {PACKS, *map(str, attempts)}:
            self._blobs.clear(attempt)
        for key in [key for key in list(self._sizes) if key[0] not in attempts]:
            self._sizes.pop(key, None)
        packs = list(self._packs.items())
        unneeded = self._unneeded_packs({key for _, keys in packs for key in keys if key[0] not in attempts})
        known = {f"{PACKS}/{name}" for name, _ in packs}
        strays = [name for name in there if name.startswith(f"{PACKS}/") and name not in known]
        self._blobs.delete([*unneeded, *strays])

    def _unneeded_packs(self, gone: set[Key]) -> list[str]:
        """Return the packs of which nothing is needed without these updates, and forget them."""
        for keys in list(self._packs.values()):
            keys -= gone
        empty = [name for name, keys in list(self._packs.items()) if not keys]
        for name in empty:
            del self._packs[name]
        return [f"{PACKS}/{name}" for name in empty]

    def _stored(self, task: Task) -> dict[bytes, int]:
        return self._sizes.get(_key(task), {})


class UpdatePack:
    """Updates of a run that are written to one file."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads, self._name = uploads, secrets.token_hex(8)
        self._tasks: list[Task] = []
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, task: Task, data: bytes) -> PackPosition:
        """Append an update; return its position."""
        position = PackPosition(self._name, self._size)
        self._tasks.append(task)
        self._parts.append(data)
        self._size += len(data)
        return position

    def write(self) -> None:
        """Write the pack; it is durable on return."""
        self._uploads.put_pack(self._name, self._tasks, self._parts)


def _key(task: Task) -> Key:
    return task.attempt, task.client


def _path(key: Key, digest: bytes) -> str:
    return f"{key[0]}/{key[1]}-{digest.hex()}"
