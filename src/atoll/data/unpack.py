"""How archives become raw files. Members are read by name, one by one; paths inside an archive are never followed."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from atoll.data.sources import CHUNK, RawFile, Unpack, Unreachable, run_client


class Readable(Protocol):
    """Anything that bytes can be read from."""

    def read(self, size: int, /) -> bytes: ...


def as_is(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Take each archive as the raw file."""
    for archive, file in zip(archives, files, strict=True):
        with archive.open("rb") as stream:
            copy_limited(stream, into / file.name, file.num_bytes)


def gunzip(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Decompress each archive into one raw file."""
    for archive, file in zip(archives, files, strict=True):
        with gzip.open(archive) as stream:
            copy_limited(stream, into / file.name, file.num_bytes)


def from_tar(folder: str) -> Unpack:
    """Take the raw files from a folder of one tar archive."""

    def unpack(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
        members = {f"{folder}/{file.name}": file for file in files}
        for name, stream in tar_members(archives[0], {name: file.num_bytes for name, file in members.items()}):
            copy_limited(stream, into / members[name].name, members[name].num_bytes)

    return unpack


def from_deb(folder: str) -> Unpack:
    """Take gzipped raw files from a folder of one Debian package."""

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
    """Give the wanted members of a tar archive, each a plain file of at most so many bytes; miss none."""
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


def copy_limited(stream: Readable, target: Path, num_bytes: int) -> None:
    """Copy a file that must have exactly so many bytes, and read no more than that."""
    left = num_bytes
    with target.open("wb") as out:
        while left and (chunk := stream.read(min(CHUNK, left))):
            out.write(chunk)
            left -= len(chunk)
    if left or stream.read(1):
        raise Unreachable(f"{target.name} has {'fewer' if left else 'more'} than the {num_bytes} bytes expected")


@contextmanager
def damage_is_unreachable(archives: Sequence[Path]) -> Iterator[None]:
    """Report an archive that cannot be read as any other source that does not give what it should."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        names = ", ".join(path.name for path in archives)
        raise Unreachable(f"{names}: damaged ({str(error).partition(chr(10))[0] or 'it ends early'})") from error
