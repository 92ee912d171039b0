"""The cache of raw files: what is in it has been checked, and what is missing is fetched, whole or not at all."""

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
STAGING = ".fetch-"
STALE_SECONDS = 24 * 3600.0


def cache_dir() -> Path:
    """Where raw files are kept: the environment variable ATOLL_DATA, or the user's cache of this platform."""
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
    """Return the path of every raw file, fetching what the cache lacks from the first source that gives all of it."""
    folder = cache_dir() / dataset_name
    with _disk_trouble(folder):
        wanted = [file for file in files if not _cached(folder, file)]
        if wanted:
            _fetch(dataset_name, files, sources, folder, quiet)
    return {file.name: folder / file.name for file in files}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _cached(folder: Path, file: RawFile) -> bool:
    """Tell whether the cache has a file and it is right; remove it if it is wrong."""
    path = folder / file.name
    if not path.is_file():
        return False
    verified = _read_verified(folder)
    if verified.get(file.name) == _stamp(path, file):
        return True
    if sha256_of(path) == file.sha256:
        _write_verified(folder, verified | {file.name: _stamp(path, file)})
        return True
    LOG.warning("%s is not what it should be (its SHA-256 differs): removed, and fetched again", path)
    path.unlink()
    return False


def _fetch(name: str, files: Sequence[RawFile], sources: Sequence[Source], folder: Path, quiet: bool) -> None:
    """Try archives that were put into the folder by hand, then every route in turn; one that works is enough."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    missing = ", ".join(file.name for file in files if not (folder / file.name).is_file())
    tried = [f"cache {folder}: not there: {missing}"]
    for by_hand, source in [*((True, source) for source in sources), *((False, source) for source in sources)]:
        route = source.route
        if by_hand and not all((folder / archive).is_file() for archive in route.archives):
            continue
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=folder, ignore_cleanup_errors=True) as made:
            staging = Path(made)
            try:
                if not by_hand:
                    route.download(staging, quiet)
                archives = [(folder if by_hand else staging) / archive for archive in route.archives]
                _unpack(source, archives, files, staging, folder)
                return
            except Unreachable as reason:
                label = f"{', '.join(route.archives)} in {folder}" if by_hand else route.label
                tried.append(f"{label}: {reason}")
    raise DataError(_nothing_worked(name, files, sources, folder, tried))


def _unpack(source: Source, archives: Sequence[Path], files: Sequence[RawFile], staging: Path, folder: Path) -> None:
    """Unpack next to the cache, check every file, and only then let each take its place in one step."""
    fresh = staging / "raw"
    fresh.mkdir()
    with damage_is_unreachable(archives):
        source.unpack(archives, files, fresh)
    for file in files:
        got = sha256_of(fresh / file.name)
        if got != file.sha256:
            raise Unreachable(f"{file.name} has SHA-256 {got[:12]}..., expected {file.sha256[:12]}...")
    for file in files:
        (fresh / file.name).replace(folder / file.name)
    _write_verified(folder, {file.name: _stamp(folder / file.name, file) for file in files})


def _nothing_worked(
    name: str, files: Sequence[RawFile], sources: Sequence[Source], folder: Path, tried: Sequence[str]
) -> str:
    plain = ", ".join(file.name for file in files)
    packed = [", ".join(source.route.archives) for source in sources]
    ways_out = [
        f"put these files into {folder} (or into DIR/{name} and set ATOLL_DATA=DIR): {plain}"
        + "".join(f"; or {archives}" for archives in dict.fromkeys(packed) if archives != plain),
        *(f"for {source.route.label}: {source.route.advice}" for source in sources),
        'use data = "digits", which needs no download',
    ]
    lines = [f"{name} could not be fetched. Tried:", *tried, "Any one of these helps:", *ways_out]
    return "\n".join(line if line.endswith(":") else f"  - {line}" for line in lines)


def _stamp(path: Path, file: RawFile) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, file.sha256]


def _read_verified(folder: Path) -> dict[str, list[object]]:
    """Which files were checked, as of which size and time: unchanged ones need not be read again."""
    try:
        stamps = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_verified(folder: Path, stamps: dict[str, list[object]]) -> None:
    # A cache on a read-only disk is fine: it is then checked at every load.
    with suppress(OSError):
        draft = folder / f"{STAGING}{os.getpid()}.json"
        draft.write_text(json.dumps(stamps), encoding="utf-8")
        draft.replace(folder / VERIFIED)


def _sweep(folder: Path) -> None:
    """Remove what a killed download left behind a day ago or earlier."""
    for left in folder.glob(f"{STAGING}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def _disk_trouble(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
        problem = "the disk is full" if full else error.strerror or type(error).__name__
        raise DataError(
            f"cannot keep data in {folder}: {problem}; make room or grant access there, or set ATOLL_DATA to another "
            "directory"
        ) from error
