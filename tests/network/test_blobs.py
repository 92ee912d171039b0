"""One law for all places where large things lie: a directory, and object stores of every kind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from network.federation import RUN, federation, free_port, simulated, until
from network.fork_server import ForkServer

from atoll import Plan
from atoll.core.errors import RunError
from atoll.core.messages import Task
from atoll.network.protocol.blobs import Blobs, Bucket, Disk, StoreAway, blobs_at
from atoll.network.protocol.objects import CHUNK, ObjectError, Objects, manifest_of
from atoll.network.server.uploads import MAX_SHORT_CHUNKS, UpdatePack, Uploads, UploadTooLarge

KINDS = ["disk", "local", "memory", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bucket in a server that speaks S3, a process of its own."""
    pytest.importorskip("moto.server", reason="install moto[server] for a server that speaks S3")
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
    }
    out = tmp_path_factory.mktemp("s3") / "out"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with out.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                until(lambda: "Running on" in out.read_text(), 60, "the S3 server")
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.status == 200
                yield "s3://bucket"
        finally:
            server.terminate()


@pytest.fixture(params=KINDS)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    """An empty place of each kind."""
    if request.param == "disk":
        return Disk(tmp_path / "blobs")
    store = pytest.importorskip("obstore.store")
    if request.param == "s3":
        return blobs_at(tmp_path, f"{request.getfixturevalue('s3')}/{os.urandom(8).hex()}")("run", "objects")
    made = store.MemoryStore() if request.param == "memory" else store.LocalStore(tmp_path)
    return Bucket(made, "run/objects")


def test_what_is_put_is_there_until_it_is_deleted(blobs: Blobs) -> None:
    assert blobs.size("a/b") == -1 and blobs.sizes("a") == {}
    with pytest.raises(FileNotFoundError):
        blobs.get("a/b")
    blobs.put("a/b", b"one")
    blobs.put("a/c/d", memoryview(b"-three-")[1:-1])
    blobs.put("ab/c", b"")
    blobs.sync("a")
    blobs.sync("nothing here")
    blobs.sweep()
    assert (blobs.get("a/b"), blobs.get("a/c/d"), blobs.get("ab/c")) == (b"one", b"three", b"")
    assert (blobs.get("a/c/d", 1, 3), blobs.get("a/c/d", 4, 1), blobs.get("a/c/d", 2)) == (b"hre", b"e", b"ree")
    assert (blobs.size("a/b"), blobs.size("a/c/d"), blobs.size("ab/c")) == (3, 5, 0)
    assert blobs.sizes("a") == {"b": 3, "c/d": 5}
    assert blobs.sizes("") == {"a/b": 3, "a/c/d": 5, "ab/c": 0}
    blobs.delete(["a/b", "a/never"])
    blobs.delete([])
    assert blobs.sizes("a") == {"c/d": 5}
    blobs.clear("a")
    blobs.clear("a")
    assert blobs.sizes("") == {"ab/c": 0}


def test_objects_lie_anywhere(blobs: Blobs) -> None:
    objects, data = Objects(blobs), os.urandom(20 * CHUNK) + bytes(2 * CHUNK) + b"end"
    name = objects.put(memoryview(data)[:5], data[5:])
    assert name == manifest_of(data).name() and objects.missing(manifest_of(data)) == []
    other = objects.put(b"small")
    again = Objects(blobs)  # another process
    assert again.get(name) == data and again.part(name, 22) == b"end"
    blobs.delete([f"chunks/{hashlib.sha256(bytes(CHUNK)).hexdigest()}"])
    assert again.missing(manifest_of(data)) == [hashlib.sha256(bytes(CHUNK)).digest()]
    assert again.keep_only([other]) == 22
    assert again.get(other) == b"small"
    with pytest.raises(ObjectError, match="no object"):
        again.get(name)


def test_of_one_client_few_short_chunks_and_few_bytes_are_kept(tmp_path: Path) -> None:
    uploads, task = Uploads(Disk(tmp_path)), Task(3, 0, 7)
    with ThreadPoolExecutor(8) as pool:  # at once, and none slips through

        def put(number: int) -> bool:
            with contextlib.suppress(UploadTooLarge):
                data = number.to_bytes(3, "big")
                uploads.put_chunk(task, hashlib.sha256(data).digest(), data, 1 << 20)
                return True
            return False

        assert sum(pool.map(put, range(500))) == MAX_SHORT_CHUNKS
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == MAX_SHORT_CHUNKS
    other = Task(4, 0, 7)
    for number in range(3):
        data = bytes([number]) * CHUNK
        uploads.put_chunk(other, hashlib.sha256(data).digest(), data, 3 * CHUNK)
    for data, why in ((bytes([9]) * CHUNK, "more was sent"), (b"", "but the last of an object")):
        with pytest.raises(UploadTooLarge, match=why):
            uploads.put_chunk(other, hashlib.sha256(data).digest(), data, 3 * CHUNK)
    uploads.drop_other_tasks(4, (task,))
    assert uploads.stored_sizes(4) == [] and len(uploads.stored_sizes(3)) == MAX_SHORT_CHUNKS


def test_uploads_lie_anywhere(blobs: Blobs) -> None:
    uploads, task, data = Uploads(blobs), Task(3, 0, 7), os.urandom(CHUNK) + b"rest"
    manifest = manifest_of(data)
    first, rest = manifest.chunks
    assert uploads.missing(task, manifest) == [first, rest] and uploads.stored_sizes(3) == []
    uploads.put_chunk(task, first, data[:CHUNK], 2 * CHUNK)
    uploads.put_chunk(task, first, data[:CHUNK], 2 * CHUNK)
    assert uploads.missing(task, manifest) == [rest] and uploads.stored_sizes(3) == [CHUNK]
    with pytest.raises(ObjectError, match="1 chunks are missing"):
        uploads.complete_chunks(task, manifest)
    again = Uploads(blobs)  # another process
    assert again.stored_sizes(3) == [CHUNK]
    again.put_chunk(task, rest, b"rest", 2 * CHUNK)
    assert b"".join(again.complete_chunks(task, manifest)) == b"".join(again.read(task, manifest)) == data
    blobs.put(f"7/3-{rest.hex()}", b"lies")
    with pytest.raises(ObjectError, match="was changed"):
        b"".join(again.read(task, manifest))
    other = Task(4, 0, 8)
    again.put_chunk(other, rest, b"rest", 2 * CHUNK)
    again.drop_tasks((task,))
    assert blobs.sizes("") == {f"8/4-{rest.hex()}": 4} and again.stored_sizes(3) == []
    blobs.put("stray/file", b"")
    assert Uploads(blobs).stored_sizes(4) == [4]
    again.drop_other_attempts({9})
    assert blobs.sizes("") == {} and again.stored_sizes(4) == []


def test_small_updates_are_written_together(blobs: Blobs) -> None:
    uploads, tasks = Uploads(blobs), [Task(client, 0, attempt) for client, attempt in ((1, 5), (2, 5), (3, 6))]
    data = [os.urandom(100 * task.client) for task in tasks]
    pack = UpdatePack(uploads)
    spots = [pack.add(task, each) for task, each in zip(tasks, data, strict=True)]
    assert blobs.sizes("") == {}
    pack.write()
    (name,) = blobs.sizes("")
    for task, each, spot in zip(tasks, data, spots, strict=True):
        assert b"".join(uploads.read(task, manifest_of(each), spot)) == each
    with pytest.raises(ObjectError, match="was changed"):
        b"".join(uploads.read(tasks[1], manifest_of(data[1]), spots[0]))
    uploads.drop_tasks(tasks[:1])
    uploads.drop_other_attempts({6})
    assert list(blobs.sizes("")) == [name]
    again = Uploads(blobs)  # another process
    again.restore(tasks[2], spots[2])
    again.drop_other_attempts({6})
    assert list(blobs.sizes("")) == [name]
    again.drop_tasks(tasks)
    assert blobs.sizes("") == {}
    pack.write()
    Uploads(blobs).drop_other_attempts({5, 6})  # nobody needs it
    assert blobs.sizes("") == {}


def test_a_directory_never_shows_half_a_file(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "half").write_bytes(b"hal")
    disk = Disk(tmp_path)
    assert disk.sizes("") == {}
    disk.sweep()
    assert list((tmp_path / "new").iterdir()) == []


def test_addresses(tmp_path: Path) -> None:
    for url in (None, str(tmp_path / "there"), f"file://{tmp_path}/there"):
        blobs_at(tmp_path / "home", url)("run", "objects").put("a", b"1")
        there = tmp_path / "home" / "runs" if url is None else tmp_path / "there"
        assert (there / "run" / "objects" / "a").read_bytes() == b"1"
    with pytest.raises(RunError, match=r"one of s3://, gs://, az://, got 'ftp://there'"):
        blobs_at(tmp_path, "ftp://there")


def test_a_store_that_does_not_serve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr("atoll.network.protocol.blobs.RETRIES", 0)
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with pytest.raises(StoreAway, match="the object store of --objects does not serve"):
        blobs_at(tmp_path, "s3://bucket")


PLAN = Plan(seed=4, rounds=2, partition={"name": "iid", "num_clients": 2}, local={"steps": 2})


@pytest.mark.slow
def test_a_federation_whose_models_lie_in_an_object_store(
    processes: ForkServer, certs: Path, s3: str, tmp_path: Path
) -> None:
    with federation(tmp_path / "f", processes, certs, PLAN) as made:
        made.env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        made.run_to_end(2, 60, "--objects", f"{s3}/ours")
        assert made.model() == simulated(PLAN, tmp_path / "alone")
        assert made.audited().rounds == 2
        assert not (made.directory() / "objects").exists() and not (made.directory() / "uploads").exists()
        place = blobs_at(tmp_path, f"{s3}/ours")
        assert place(RUN, "uploads").sizes("") == {}
        assert {name.split("/")[0] for name in place(RUN, "objects").sizes("")} == {"chunks", "manifests"}
