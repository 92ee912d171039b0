"""Compile the kernels at first use into the user's cache, and load them.

`python -m atoll.train.kernels.build` does it ahead, and says which library is used or why there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from atoll.data.fetch import cache_dir

SOURCES = ("train.c", "linear.c", "conv.c")
HEADER = "chain.h"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
"""Products are added by fused operations, and nothing is reordered: all processors then give the same bits."""
PROCESSORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
    "aarch64": (),
}
"""What a processor is called, and the flags for it."""
SECONDS = 120
"""How long a compiler may take."""
MOST_SHOWN = 300


class Unavailable(Exception):
    """There are no kernels here; the message says why."""


def processor() -> str:
    """Name the instructions that kernels are compiled for; Unavailable if there are none for this processor."""
    machine = platform.machine()
    name = "aarch64" if machine in ("aarch64", "arm64") else torch.backends.cpu.get_cpu_capability()
    if name not in PROCESSORS or sys.platform == "win32":
        raise Unavailable(f"there are no kernels for {sys.platform} on {machine} ({name})")
    return name


@cache
def library(kind: str | None = None) -> ctypes.CDLL:
    """Load the kernels for this processor or for another `kind`, compiled before or now; Unavailable if that fails."""
    kind = kind or processor()
    path = _path(kind)
    if not _is_ours(path):
        return _compiled(path, kind)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # cut off, or of another system that shares this directory
        return _compiled(path, kind)


def is_built() -> bool:
    """Return whether the kernels were compiled before, so that loading them takes no time."""
    try:
        return _is_ours(_path(processor()))
    except Unavailable:
        return False


def _path(kind: str) -> Path:
    """Where the library of these sources lies."""
    digest = hashlib.sha256(repr((FLAGS, PROCESSORS[kind], sys.platform)).encode())
    for name in (HEADER, *SOURCES):
        digest.update(_here(name).read_bytes())
    return cache_dir() / "kernels" / f"{kind}-{digest.hexdigest()[:16]}.so"


def _here(name: str) -> Path:
    return Path(__file__).with_name(name)


def _is_ours(path: Path) -> bool:
    """Whether a library is there that nobody else could have written."""
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid in (0, os.getuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiled(path: Path, kind: str) -> ctypes.CDLL:
    """Compile the kernels, keep them for the next time if that is possible, and load them."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / path.name
        sources = [str(_here(name)) for name in SOURCES]
        command = [*compiler, *FLAGS, *PROCESSORS[kind], "-o", str(made), *sources, "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler[0]} failed: {error}") from error
        if done.returncode or not made.exists():
            raise Unavailable(f"{compiler[0]} failed: {' '.join(done.stderr.split())[:MOST_SHOWN]}")
        try:
            loaded = ctypes.CDLL(str(made))
        except OSError as error:
            raise Unavailable(f"what {compiler[0]} made cannot be loaded: {error}") from error
        _keep(made, path)
    return loaded


def _keep(made: Path, path: Path) -> None:
    """Copy a library into the cache in one step; another process may do the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(made.read_bytes())
        os.chmod(name, stat.S_IRUSR | stat.S_IWUSR | stat.S_IXUSR)
        os.replace(name, path)
    except OSError:  # a cache that cannot be written to costs time, nothing else
        return


def _compiler() -> list[str]:
    """Return the command that compiles C: that of the environment variable CC, or one that is installed."""
    chosen = shlex.split(os.environ.get("CC", ""))
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if chosen and shutil.which(chosen[0]):
        return chosen
    if found is None:
        raise Unavailable("there is no C compiler: install one, such as gcc, and kernels are built at the next run")
    return [found]


def main() -> None:
    """Compile the kernels if they are not there, and say what is used."""
    try:
        name = processor()
        library()
        print(f"kernels for {name}: {_path(name)}")
    except Unavailable as error:
        print(f"no kernels, which costs nothing but speed: {error}")


if __name__ == "__main__":
    main()
