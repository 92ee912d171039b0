"""What clients send for their tasks, until it is counted.

Large updates come in chunks: a folder for each attempt, a blob for each chunk of a client. Clients do not share chunks:
nobody can find out by asking what somebody else has sent. Small updates come whole, and those that come together are
written together, into one pack. What is here is known without looking, as nobody else writes here.
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

PACKS = "packs"
NAME = re.compile(r"([0-9]+)/([0-9]+)-([0-9a-f]{64})")
SHORT = 16
"""So many chunks of a client are kept that are shorter than others: each object has one, and each is a file."""
Key = tuple[int, int]
"""Attempt and client."""


class UploadTooLarge(AtollError):
    """More than is kept of one client."""


class PackPosition(NamedTuple):
    """Where an update begins that was written together with others."""

    pack: str
    start: int


class Uploads:
    """The uploads of one run."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._sizes: dict[Key, dict[bytes, int]] = {}
        self._packs: dict[str, set[Key]] = {}
        self._counting = threading.Lock()
        self._coming: dict[int, list[int]] = {}
        """The bytes of chunks that are being written, by client."""
        for name, size in blobs.sizes("").items():
            if found := NAME.fullmatch(name):
                self._sizes.setdefault((int(found[1]), int(found[2])), {})[bytes.fromhex(found[3])] = size

    def put_chunk(self, task: Task, digest: bytes, data: bytes, most: int) -> None:
        """Keep a chunk of a client of which `most` bytes are kept; the caller has checked that this is its hash."""
        if self._here(task).get(digest) == len(data):
            return
        with self._counting:  # requests of one client come at once, too
            sizes = [*self.stored_sizes(task.client), *self._coming.get(task.client, ()), len(data)]
            short = sum(size < CHUNK for size in sizes)
            if sum(sizes) > most:
                raise UploadTooLarge(
                    f"more was sent for this task than an update can be: at most {most:,} bytes are kept"
                )
            if not data or short > SHORT:
                raise UploadTooLarge(
                    f"a chunk has {CHUNK:,} bytes, but the last of an object: {short} shorter ones were sent"
                )
            self._coming.setdefault(task.client, []).append(len(data))
        try:
            self._blobs.put(_path(_key(task), digest), data)
            self._sizes.setdefault(_key(task), {})[digest] = len(data)
        finally:
            with self._counting:
                self._coming[task.client].remove(len(data))

    def stored_sizes(self, client: int) -> list[int]:
        """The bytes of every chunk that is here of a client."""
        return [size for key, sizes in list(self._sizes.items()) if key[1] == client for size in list(sizes.values())]

    def put_pack(self, name: str, tasks: Iterable[Task], parts: list[bytes]) -> None:
        """Keep whole updates; at the end they outlive a loss of power."""
        self._packs[name] = set(map(_key, tasks))
        self._blobs.put(f"{PACKS}/{name}", *parts)
        self._blobs.sync(PACKS)

    def restore(self, task: Task, position: PackPosition) -> None:
        """Remember after a restart that an update is still needed."""
        self._packs.setdefault(position.pack, set()).add(_key(task))

    def missing(self, task: Task, manifest: Manifest) -> list[bytes]:
        """Which chunks of an object are not here, or have another size than the manifest says."""
        here = self._here(task)
        sizes = dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        return [digest for digest, size in sizes.items() if here.get(digest) != size]

    def complete_chunks(self, task: Task, manifest: Manifest) -> Iterator[bytes]:
        """The chunks of an object, which are all here."""
        missing = self.missing(task, manifest)
        if missing:
            raise ObjectError(f"{len(missing)} chunks are missing: send them first")
        return (self._blobs.get(_path(_key(task), digest)) for digest in manifest.chunks)

    def sync(self, attempt: int) -> None:
        """Let chunks that were sent in an attempt so far outlive a loss of power."""
        self._blobs.sync(str(attempt))

    def read(self, task: Task, manifest: Manifest, position: PackPosition | None = None) -> Iterator[bytes]:
        """The chunks of an object, checked against their hashes: disks forget too."""
        for digest in manifest.chunks:
            if position is None:
                data = self._blobs.get(_path(_key(task), digest))
            else:
                data = self._blobs.get(f"{PACKS}/{position.pack}", position.start, manifest.num_bytes)
            if hashlib.sha256(data).digest() != digest:
                raise ObjectError(f"chunk {digest.hex()} of an upload was changed: restore it from a copy")
            yield data

    def drop_tasks(self, tasks: Iterable[Task]) -> None:
        """Remove what was sent for some tasks."""
        gone = set(map(_key, tasks))
        names = [_path(key, digest) for key in gone for digest in self._sizes.pop(key, {})]
        self._blobs.delete([*names, *self._unneeded(gone)])

    def drop_other_tasks(self, client: int, tasks: Iterable[Task]) -> None:
        """Remove what a client sent for other tasks than these."""
        kept = set(map(_key, tasks))
        gone = [key for key in list(self._sizes) if key[1] == client and key not in kept]
        self._blobs.delete([_path(key, digest) for key in gone for digest in self._sizes.pop(key, {})])

    def drop_other_attempts(self, attempts: set[int]) -> None:
        """Remove what was sent in other attempts than these."""
        there = self._blobs.sizes("")
        for attempt in {name.split("/")[0] for name in there} - {PACKS, *map(str, attempts)}:
            self._blobs.clear(attempt)
        for key in [key for key in list(self._sizes) if key[0] not in attempts]:
            self._sizes.pop(key, None)
        packs = list(self._packs.items())
        unneeded = self._unneeded({key for _, keys in packs for key in keys if key[0] not in attempts})
        known = {f"{PACKS}/{name}" for name, _ in packs}
        strays = [name for name in there if name.startswith(f"{PACKS}/") and name not in known]
        self._blobs.delete([*unneeded, *strays])

    def _unneeded(self, gone: set[Key]) -> list[str]:
        """Packs of which nothing is needed without these."""
        for keys in list(self._packs.values()):
            keys -= gone
        empty = [name for name, keys in list(self._packs.items()) if not keys]
        for name in empty:
            del self._packs[name]
        return [f"{PACKS}/{name}" for name in empty]

    def _here(self, task: Task) -> dict[bytes, int]:
        return self._sizes.get(_key(task), {})


class UpdatePack:
    """Updates of one run that are written together."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads, self._name = uploads, secrets.token_hex(8)
        self._tasks: list[Task] = []
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, task: Task, data: bytes) -> PackPosition:
        """Put an update behind the others; where that is."""
        position = PackPosition(self._name, self._size)
        self._tasks.append(task)
        self._parts.append(data)
        self._size += len(data)
        return position

    def write(self) -> None:
        """Write them, so that they outlive a loss of power."""
        self._uploads.put_pack(self._name, self._tasks, self._parts)


def _key(task: Task) -> Key:
    return task.attempt, task.client


def _path(key: Key, digest: bytes) -> str:
    return f"{key[0]}/{key[1]}-{digest.hex()}"
