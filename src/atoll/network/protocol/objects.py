"""Content-addressed objects: chunks named by their SHA-256, so that no chunk is sent twice and every one is checked.

An object is a manifest: its size and the ordered hashes of its chunks. A manifest is written after all of its chunks,
so that after a kill at any moment a name stands for complete and correct bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from atoll.core.errors import AtollError
from atoll.network.protocol.blobs import Blobs

CHUNK = 1 << 20
"""Bytes of every chunk of an object but the last."""
MAX_CHUNKS = 1 << 20
HASH = 32
CHUNKS, MANIFESTS = "chunks", "manifests"
FEW = 16
"""Up to this number of chunks, each is looked up; beyond it, listing all is faster."""

Digest = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The size of an object, and the hashes of its chunks."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=CHUNK * MAX_CHUNKS)]
    chunks: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]

    def sizes(self) -> list[int]:
        """Return the size of each chunk, which follows from that of the object."""
        full, rest = divmod(self.num_bytes, CHUNK)
        return [CHUNK] * full + ([rest] if rest else [])

    def name(self) -> str:
        """Return the name of the object: a hash of the manifest."""
        return hashlib.sha256(b"atoll object 1" + msgspec.msgpack.encode(self)).hexdigest()


def max_manifest_bytes(num_bytes: int) -> int:
    """Return the most bytes that the manifest of an object of this size takes."""
    return 64 + (HASH + 2) * (-(-num_bytes // CHUNK) + 1)


MAX_MANIFEST = max_manifest_bytes(CHUNK * MAX_CHUNKS)


class ObjectError(AtollError):
    """An object or chunk that is missing, malformed, or does not match its name."""


def cut(*parts: bytes | memoryview) -> Iterator[memoryview]:
    """Cut the concatenation of parts into chunks."""
    from atoll.core.wire import recut  # it needs torch, which commands of operators do without

    return recut(parts, CHUNK)


def manifest_of(*parts: bytes | memoryview) -> Manifest:
    """Return the manifest of the concatenation of parts."""
    return Manifest(sum(map(len, parts)), tuple(hashlib.sha256(chunk).digest() for chunk in cut(*parts)))


def read_manifest(data: bytes, max_bytes: int) -> Manifest:
    """Read a manifest; ObjectError if it is malformed or its object is larger than `max_bytes`."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ObjectError(f"this is no manifest ({error}): send one as the protocol says") from error
    if msgspec.msgpack.encode(manifest) != data:
        raise ObjectError("this manifest is not in the shortest form of msgpack: send one as the protocol says")
    if manifest.num_bytes > max_bytes:
        raise ObjectError(f"an object of {manifest.num_bytes:,} bytes, at most {max_bytes:,} are due: check the model")
    if len(manifest.sizes()) != len(manifest.chunks):
        raise ObjectError(f"{len(manifest.chunks)} chunks cannot hold {manifest.num_bytes:,} bytes: cut it anew")
    return manifest


class Objects:
    """Objects in blobs: their chunks and manifests, each under its own name."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._manifests: dict[str, Manifest] = {}

    def sweep(self) -> None:
        """Remove partial files of a killed process; no other process may be writing."""
        self._blobs.sweep()

    def put(self, *parts: bytes | memoryview) -> str:
        """Store the concatenation of parts as an object; return its name."""
        digests = []
        for chunk in cut(*parts):
            digests.append(hashlib.sha256(chunk).digest())
            if not self.has_chunk(digests[-1]):
                self._blobs.put(_chunk(digests[-1]), chunk)
        return self.put_manifest(Manifest(sum(map(len, parts)), tuple(digests)))

    def put_chunk(self, digest: bytes, data: bytes | memoryview) -> None:
        """Store a received chunk, after a check of its hash."""
        if hashlib.sha256(data).digest() != digest:
            raise ObjectError("a chunk that does not have the hash of its name: send it again")
        if not self.has_chunk(digest):
            self._blobs.put(_chunk(digest), data)

    def put_manifest(self, manifest: Manifest) -> str:
        """Store a manifest whose chunks are all stored; return the object's name."""
        missing = self.missing(manifest)
        if missing:
            raise ObjectError(f"{len(missing)} chunks are missing: send them first")
        name = manifest.name()
        if self._blobs.size(f"{MANIFESTS}/{name}") < 0:
            self._blobs.sync(CHUNKS)
            self._blobs.put(f"{MANIFESTS}/{name}", msgspec.msgpack.encode(manifest))
            self._blobs.sync(MANIFESTS)
        self._manifests[name] = manifest
        return name

    def has_chunk(self, digest: bytes) -> bool:
        """Return whether a chunk is stored."""
        return self._blobs.size(_chunk(digest)) >= 0

    def missing(self, manifest: Manifest) -> list[bytes]:
        """Return the chunks of an object that are not stored, or not in the size of the manifest."""
        sizes = dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        if len(sizes) < FEW:
            return [digest for digest, size in sizes.items() if self._blobs.size(_chunk(digest)) != size]
        here = self._blobs.sizes(CHUNKS)
        return [digest for digest, size in sizes.items() if here.get(digest.hex()) != size]

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a stored object."""
        manifest = self._manifests.get(name)
        if manifest is None:
            try:
                data = self._blobs.get(f"{MANIFESTS}/{_safe(name)}")
            except FileNotFoundError as error:
                raise ObjectError(f"there is no object {name}: it was never here, or is not needed any more") from error
            manifest = self._manifests[name] = msgspec.msgpack.decode(data, type=Manifest)
        return manifest

    def chunk(self, digest: bytes) -> bytes:
        """Read a chunk, and check its hash."""
        try:
            data = self._blobs.get(_chunk(digest))
        except FileNotFoundError as error:
            raise ObjectError(f"there is no chunk {digest.hex()}: it was never here, or was removed") from error
        if hashlib.sha256(data).digest() != digest:
            raise ObjectError(f"the file of chunk {digest.hex()} was changed: restore it from a copy")
        return data

    def part(self, name: str, index: int) -> bytes:
        """Read the chunk of an object at an index."""
        chunks = self.manifest(name).chunks
        if index >= len(chunks):
            raise ObjectError(f"object {name} has {len(chunks)} chunks: there is no chunk {index}")
        return self.chunk(chunks[index])

    def read(self, name: str) -> Iterator[bytes]:
        """Read an object chunk by chunk."""
        return map(self.chunk, self.manifest(name).chunks)

    def is_sound(self, name: str) -> bool:
        """Return whether an object is stored and undamaged."""
        try:
            return all(True for _ in self.read(name))
        except ObjectError:
            return False

    def get(self, name: str) -> bytes:
        """Read an object into memory."""
        return b"".join(self.read(name))

    def keep_only(self, names: Iterable[str]) -> int:
        """Remove all other objects; return how many files were removed."""
        kept = set(names)
        manifests = {name: self.manifest(name) for name in kept}
        used = {digest.hex() for manifest in manifests.values() for digest in manifest.chunks}
        gone = [f"{MANIFESTS}/{name}" for name in self._blobs.sizes(MANIFESTS) if name not in kept]
        gone += [f"{CHUNKS}/{name}" for name in self._blobs.sizes(CHUNKS) if name not in used]
        self._manifests = manifests
        self._blobs.delete(gone)
        return len(gone)


def _chunk(digest: bytes) -> str:
    return f"{CHUNKS}/{digest.hex()}"


def _safe(name: str) -> str:
    """Return a name, after a check that it cannot lead out of its directory."""
    if len(name) != 2 * HASH or not all(letter in "0123456789abcdef" for letter in name):
        raise ObjectError(f"{name!r} is not the name of an object: a name is {2 * HASH} hexadecimal digits")
    return name
