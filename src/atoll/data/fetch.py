"""The cache of raw files: its files are verified, and missing ones are fetched, all or none."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from atoll.core.errors import DataError
from atoll.data.sources import CHUNK, RawFile, Source, Unreachable
from atoll.data.unpack import damage_is_unreachable

LOG = logging.getLogger("atoll.data")
VERIFIED = "verified.json"
"""File of the cache that lists the files verified before."""
STAGING = ".fetch-"
"""Prefix of temporary files and directories in the cache."""
STALE_SECONDS = 24 * 3600.0
"""Age in seconds after which temporary files are removed."""


def cache_dir() -> Path:
    """Return the directory of raw files: the environment variable ATOLL_DATA, or the platform's user cache."""
    if chosen := os.environ.get("ATOLL_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "atoll"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "atoll"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"


def raw_files(
    dataset_name: str, files: Sequence[RawFile], sources: Sequence[Source], *, quiet: bool = False
) -> dict[str, Path]:
    """Return the path of every raw file; fetch missing ones from the first source that provides all of them."""
    folder = cache_dir() / dataset_name
    with _disk_errors(folder):
        missing = [file for file in files if not _is_cached(folder, file)]
        if missing:
            _fetch(dataset_name, files, sources, folder, quiet)
    return {file.name: folder / file.name for file in files}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_cached(folder: Path, file: RawFile) -> bool:
    """Tell whether the cache has a valid copy of a file; remove an invalid one."""
    path = folder / file.name
    if not path.is_file():
        return False
    verified = _read_verified(folder)
    if verified.get(file.name) == _stamp(path, file):
        return True
    if sha256_of(path) == file.sha256:
        _write_verified(folder, verified | {file.name: _stamp(path, file)})
        return True
    LOG.warning("%s has an unexpected SHA-256: removed, and fetched again", path)
    path.unlink()
    return False


def _fetch(name: str, files: Sequence[RawFile], sources: Sequence[Source], folder: Path, quiet: bool) -> None:
    """Try archives that the user put into the folder, then every route in turn, until one works."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    missing = ", ".join(file.name for file in files if not (folder / file.name).is_file())
    tried = [f"cache {folder}: not there: {missing}"]
    for by_hand, source in [*((True, source) for source in sources), *((False, source) for source in sources)]:
        route = source.route
        if by_hand and not all((folder / archive).is_file() for archive in route.archives):
            continue
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=folder, ignore_cleanup_errors=True) as directory:
            staging = Path(directory)
            try:
                if not by_hand:
                    route.download(staging, quiet)
                archives = [(folder if by_hand else staging) / archive for archive in route.archives]
                _unpack(source, archives, files, staging, folder)
                return
            except Unreachable as reason:
                label = f"{', '.join(route.archives)} in {folder}" if by_hand else route.label
                tried.append(f"{label}: {reason}")
    raise DataError(_failure_text(name, files, sources, folder, tried))


def _unpack(source: Source, archives: Sequence[Path], files: Sequence[RawFile], staging: Path, folder: Path) -> None:
    """Unpack outside the cache, verify every file, then move each into the cache atomically."""
    unpacked = staging / "raw"
    unpacked.mkdir()
    with damage_is_unreachable(archives):
        source.unpack(archives, files, unpacked)
    for file in files:
        sha256 = sha256_of(unpacked / file.name)
        if sha256 != file.sha256:
            raise Unreachable(f"{file.name} has SHA-256 {sha256[:12]}..., expected {file.sha256[:12]}...")
    for file in files:
        (unpacked / file.name).replace(folder / file.name)
    _write_verified(folder, {file.name: _stamp(folder / file.name, file) for file in files})


def _failure_text(
    name: str, files: Sequence[RawFile], sources: Sequence[Source], folder: Path, tried: Sequence[str]
) -> str:
    """Return the message for the case that no source worked: what was tried, and what the user can do."""
    file_names = ", ".join(file.name for file in files)
    archive_names = [", ".join(source.route.archives) for source in sources]
    remedies = [
        f"put these files into {folder} (or into DIR/{name} and set ATOLL_DATA=DIR): {file_names}"
        + "".join(f"; or {archives}" for archives in dict.fromkeys(archive_names) if archives != file_names),
        *(f"for {source.route.label}: {source.route.advice}" for source in sources),
        'use data = "digits", which needs no download',
    ]
    lines = [f"{name} could not be fetched. Tried:", *tried, "Any one of these helps:", *remedies]
    return "\n".join(line if line.endswith(":") else f"  - {line}" for line in lines)


def _stamp(path: Path, file: RawFile) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, file.sha256]


def _read_verified(folder: Path) -> dict[str, list[object]]:
    """Return size, time and SHA-256 of the files verified before: unchanged ones need not be read again."""
    try:
        stamps = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_verified(folder: Path, stamps: dict[str, list[object]]) -> None:
    # A cache on a read-only disk is allowed: its files are then verified at every load.
    with suppress(OSError):
        draft = folder / f"{STAGING}{os.getpid()}.json"
        draft.write_text(json.dumps(stamps), encoding="utf-8")
        draft.replace(folder / VERIFIED)


def _sweep(folder: Path) -> None:
    """Remove the temporary files of killed downloads that are older than a day."""
    for leftover in folder.glob(f"{STAGING}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
        problem = "the disk is full" if full else error.strerror or type(error).__name__
        raise DataError(
            f"cannot keep data in {folder}: {problem}; free space or grant access there, or set ATOLL_DATA to another "
            "directory"
        ) from error
