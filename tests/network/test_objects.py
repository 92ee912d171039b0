"""Objects come back as they were, are sent once, and names cannot lie or lead astray."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.network.protocol import objects
from atoll.network.protocol.blobs import Disk
from atoll.network.protocol.objects import CHUNK, Manifest, ObjectError, Objects, cut, manifest_of, read_manifest


@given(st.integers(0, 3 * 64 + 5))
def test_what_is_put_can_be_got(size: int) -> None:
    import tempfile

    before, objects.CHUNK = objects.CHUNK, 64
    try:
        with tempfile.TemporaryDirectory() as root:
            store, data = Objects(Disk(Path(root))), os.urandom(size)
            name = store.put(data)
            assert bytes(store.get(name)) == data
            assert sum(store.manifest(name).sizes()) == size
            assert store.put(data) == name
    finally:
        objects.CHUNK = before


def test_an_upload_sends_what_is_missing_and_no_more(tmp_path: Path) -> None:
    store, data = Objects(Disk(tmp_path)), os.urandom(CHUNK) + bytes(2 * CHUNK) + os.urandom(100)
    manifest = manifest_of(data)
    assert len(manifest.chunks) == 4 and len(set(manifest.chunks)) == 3
    assert set(store.missing(manifest)) == set(manifest.chunks)
    by_name = dict(zip(manifest.chunks, cut(data), strict=True))
    store.put_chunk(manifest.chunks[0], by_name[manifest.chunks[0]])
    assert set(store.missing(manifest)) == set(manifest.chunks[1:])
    with pytest.raises(ObjectError, match="2 chunks are missing"):
        store.put_manifest(manifest)
    for digest in store.missing(manifest):
        store.put_chunk(digest, by_name[digest])
    assert bytes(store.get(store.put_manifest(manifest))) == data


def test_a_chunk_must_be_what_its_name_says(tmp_path: Path) -> None:
    store = Objects(Disk(tmp_path))
    with pytest.raises(ObjectError, match="hash of its name"):
        store.put_chunk(hashlib.sha256(b"one").digest(), b"two")
    name = store.put(b"a" * 100)
    [digest] = store.manifest(name).chunks
    (tmp_path / "chunks" / digest.hex()).write_bytes(b"b" * 100)
    with pytest.raises(ObjectError, match="was changed"):
        store.get(name)


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "/" + "a" * 63, "a" * 62 + "/.", "\0" * 64]
)
def test_names_do_not_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ObjectError, match="not the name of an object"):
        Objects(Disk(tmp_path)).manifest(name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        msgspec.msgpack.encode([10, [b"short"]]),
        msgspec.msgpack.encode([-1, []]),
        msgspec.msgpack.encode([CHUNK + 1, [bytes(32)]]),
        msgspec.msgpack.encode([0, [bytes(32)]]),
        msgspec.msgpack.encode([1 << 62, []]),
        msgspec.msgpack.encode([10, [bytes(32)], "more"]),
        msgspec.msgpack.encode(Manifest(2000, (bytes(32),))),
    ],
)
def test_manifests_are_not_trusted(data: bytes) -> None:
    with pytest.raises(ObjectError):
        read_manifest(data, max_bytes=1000)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    store = Objects(Disk(tmp_path))
    (tmp_path / "new" / "half").write_bytes(b"half")
    name, other = store.put(b"kept" * 10), store.put(b"not kept" * 10)
    Objects(Disk(tmp_path)).sweep()
    assert not list((tmp_path / "new").iterdir())
    assert store.keep_only([name]) == 2
    assert bytes(store.get(name)) == b"kept" * 10
    with pytest.raises(ObjectError, match="no object"):
        store.get(other)
