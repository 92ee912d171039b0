"""The command line, called as a user calls it, and called inside this process where there is much to try."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll.cli.main import main


class RawResponse(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., RawResponse]


@pytest.fixture
def shell(tmp_path: Path) -> Command:
    """Run `atoll ...` as a process of its own; -P keeps the working directory off the path, as when installed."""

    def call(*argv: str | Path) -> RawResponse:
        command = [sys.executable, "-P", "-m", "atoll.cli.main", *map(str, argv)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return RawResponse(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run `atoll ...` inside this process: the same `main`, without two seconds for the import of torch."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def call(*argv: str | Path) -> RawResponse:
        monkeypatch.setattr(sys, "argv", ["atoll", *map(str, argv)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return RawResponse(code, *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, before)
