"""Large objects as chunks named by their SHA-256: what is there already is never sent twice, and nothing is trusted.

An object is a manifest: the ordered hashes of its chunks and the size of each. It is put when all of its chunks are
there, so that a name always stands for whole and right bytes, whatever is killed when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from atoll.core.errors import AtollError
from atoll.core.wire import recut
from atoll.network.protocol.blobs import Blobs

CHUNK = 1 << 20
"""Bytes of every chunk of an object but the last."""
MAX_CHUNKS = 1 << 20
HASH = 32
CHUNKS, MANIFESTS = "chunks", "manifests"
FEW = 16
"""Fewer names than these are looked for one by one; more, by listing what there is."""

Digest = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an object is made of."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=CHUNK * MAX_CHUNKS)]
    chunks: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]

    def sizes(self) -> list[int]:
        """The bytes of each chunk; they follow from the object's."""
        full, rest = divmod(self.num_bytes, CHUNK)
        return [CHUNK] * full + ([rest] if rest else [])

    def name(self) -> str:
        """The hash by which an object is known."""
        return hashlib.sha256(b"atoll object 1" + msgspec.msgpack.encode(self)).hexdigest()


def max_manifest_bytes(num_bytes: int) -> int:
    """Return the most bytes that the manifest of an object of this size takes."""
    return 64 + (HASH + 2) * (-(-num_bytes // CHUNK) + 1)


MAX_MANIFEST = max_manifest_bytes(CHUNK * MAX_CHUNKS)


class ObjectError(AtollError):
    """Bytes that are not what they are said to be, or are not there."""


def cut(*parts: bytes | memoryview) -> Iterator[memoryview]:
    """The chunks of an object that is these parts one after another."""
    return recut(parts, CHUNK)


def manifest_of(*parts: bytes | memoryview) -> Manifest:
    """Name the chunks of an object."""
    return Manifest(sum(map(len, parts)), tuple(hashlib.sha256(chunk).digest() for chunk in cut(*parts)))


def read_manifest(data: bytes, max_bytes: int) -> Manifest:
    """Read a manifest of an object of at most so many bytes; anything else raises ObjectError."""
    try:
        found = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ObjectError(f"this is no manifest ({error}): send one as the protocol says") from error
    if msgspec.msgpack.encode(found) != data:
        raise ObjectError("this manifest is not in the shortest form of msgpack: send one as the protocol says")
    if found.num_bytes > max_bytes:
        raise ObjectError(f"an object of {found.num_bytes:,} bytes, at most {max_bytes:,} are due: check the model")
    if len(found.sizes()) != len(found.chunks):
        raise ObjectError(f"{len(found.chunks)} chunks cannot hold {found.num_bytes:,} bytes: cut it anew")
    return found


class Objects:
    """Chunks and manifests, each by its own name."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._manifests: dict[str, Manifest] = {}

    def sweep(self) -> None:
        """Remove what a process that was killed left half written; nobody else may be writing."""
        self._blobs.sweep()

    def put(self, *parts: bytes | memoryview) -> str:
        """Keep an object that is these parts one after another; return its name."""
        digests = []
        for chunk in cut(*parts):
            digests.append(hashlib.sha256(chunk).digest())
            if not self.has_chunk(digests[-1]):
                self._blobs.put(_chunk(digests[-1]), chunk)
        return self.put_manifest(Manifest(sum(map(len, parts)), tuple(digests)))

    def put_chunk(self, digest: bytes, data: bytes | memoryview) -> None:
        """Keep a chunk that somebody sent, if it is what its name says."""
        if hashlib.sha256(data).digest() != digest:
            raise ObjectError("a chunk that does not have the hash of its name: send it again")
        if not self.has_chunk(digest):
            self._blobs.put(_chunk(digest), data)

    def put_manifest(self, manifest: Manifest) -> str:
        """Keep a manifest whose chunks are all here; return the object's name."""
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
        """Whether a chunk is here."""
        return self._blobs.size(_chunk(digest)) >= 0

    def missing(self, manifest: Manifest) -> list[bytes]:
        """Which chunks of an object are not here, or have another size than the manifest says."""
        sizes = dict(zip(manifest.chunks, manifest.sizes(), strict=True))
        if len(sizes) < FEW:
            return [digest for digest, size in sizes.items() if self._blobs.size(_chunk(digest)) != size]
        here = self._blobs.sizes(CHUNKS)
        return [digest for digest, size in sizes.items() if here.get(digest.hex()) != size]

    def manifest(self, name: str) -> Manifest:
        """What an object is made of."""
        found = self._manifests.get(name)
        if found is None:
            try:
                data = self._blobs.get(f"{MANIFESTS}/{_safe(name)}")
            except FileNotFoundError as error:
                raise ObjectError(f"there is no object {name}: it was never here, or is not needed any more") from error
            found = self._manifests[name] = msgspec.msgpack.decode(data, type=Manifest)
        return found

    def chunk(self, digest: bytes) -> bytes:
        """The bytes of a chunk, checked."""
        try:
            data = self._blobs.get(_chunk(digest))
        except FileNotFoundError as error:
            raise ObjectError(f"there is no chunk {digest.hex()}: it was never here, or was removed") from error
        if hashlib.sha256(data).digest() != digest:
            raise ObjectError(f"the file of chunk {digest.hex()} was changed: restore it from a copy")
        return data

    def part(self, name: str, index: int) -> bytes:
        """One chunk of an object."""
        chunks = self.manifest(name).chunks
        if index >= len(chunks):
            raise ObjectError(f"object {name} has {len(chunks)} chunks: there is no chunk {index}")
        return self.chunk(chunks[index])

    def read(self, name: str) -> Iterator[bytes]:
        """An object, chunk by chunk."""
        return map(self.chunk, self.manifest(name).chunks)

    def is_sound(self, name: str) -> bool:
        """Whether an object is here, and all of it as it was written."""
        try:
            return all(True for _ in self.read(name))
        except ObjectError:
            return False

    def get(self, name: str) -> bytes:
        """A whole object."""
        return b"".join(self.read(name))

    def keep_only(self, names: Iterable[str]) -> int:
        """Remove every object but these; return how many files went."""
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
    """A name that cannot lead out of its directory."""
    if len(name) != 2 * HASH or not all(letter in "0123456789abcdef" for letter in name):
        raise ObjectError(f"{name!r} is not the name of an object: a name is {2 * HASH} hexadecimal digits")
    return name
