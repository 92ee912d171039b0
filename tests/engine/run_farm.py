"""A process that imports torch once and then forks a process for each run that it is told to start.

Tests kill the runs; a fork costs milliseconds where a fresh interpreter costs seconds. Requests and answers are lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.events import Event, RoundCommitted, RunStarted


class Farm:
    """The test's side: start runs, one at a time, and hear what they say."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._rest = process, b""

    def start(
        self,
        plan: dict[str, Any],
        out: Path | None,
        stop_at: int = 0,
        with_signal: int = signal.SIGKILL,
        die: tuple[int, float] | None = None,
    ) -> int:
        """Begin a run, or go on with one, and return the number of its process.

        With `stop_at` it gets a signal when it is about to write or rename a file of its directory for that time. With
        `die=(r, s)` it dies s seconds after round r, wherever it then is: the operating system's alarm ends it
        as abruptly as SIGKILL does, and is not late when the test is.
        """
        assert self._process.stdin is not None
        request = {
            "plan": plan,
            "out": str(out) if out else None,
            "stop_at": stop_at,
            "with_signal": with_signal,
            "die": die,
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        word, pid = self.hear(60).split()
        assert word == "started"
        return int(pid)

    def hear(self, seconds: float) -> str:
        """The next line of the run, or "" if it says nothing for so long."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                return ""
            piece = os.read(self._process.stdout.fileno(), 65536)
            assert piece, "the farm has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def until(self, word: str | tuple[str, ...], seconds: float = 60) -> list[str]:
        """Listen up to the line that begins with a word, or with one of several, and return all lines."""
        lines: list[str] = []
        while not lines or not lines[-1].startswith(word):
            lines.append(self.hear(seconds))
            assert lines[-1], f"nothing more was said after {lines}"
        return lines

    def ended(self) -> int:
        """Wait for the end of the run and return its exit code; minus the signal if it was killed."""
        return int(self.until("ended")[-1].split()[1])


@contextlib.contextmanager
def run_farm() -> Iterator[Farm]:
    """Start the farm and end it."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        yield Farm(process)
        process.stdin.close()


class Teller:
    """Tells what happens in a run, with the seconds since it was started, and lets it die where it is told to."""

    def __init__(self, die: tuple[int, float] | None) -> None:
        self._started, self._die, self._rounds = time.perf_counter(), die, -1
        self._reach(0)

    def _reach(self, done: int) -> None:
        if self._die and done >= self._die[0]:
            if not any(signal.getitimer(signal.ITIMER_REAL)):
                signal.setitimer(signal.ITIMER_REAL, max(self._die[1], 1e-6))
            if done == self._rounds:
                signal.pause()  # it is not to escape its alarm by coming to its end

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            say(f"begin {event.version}")
            self._rounds = event.rounds
            self._reach(event.version)
        elif isinstance(event, RoundCommitted):
            say(f"round {event.row['round']} {time.perf_counter() - self._started}")
            self._reach(event.row["round"])


def say(text: str) -> None:
    """Write one line at once."""
    os.write(1, f"{text}\n".encode())


class Telling(nn.Module):
    """A model that tells when it begins to train; batch norm keeps it out of stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
        self.told = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.told:
            self.told = True
            say(f"training {os.getpid()}")
        scores: Tensor = self.layers(x)
        return scores


def telling() -> nn.Module:
    """The factory that plans name as engine.run_farm:telling."""
    return Telling()


def _stop_at(number: int, path: Path, with_signal: int) -> None:
    """Watch what Python opens for writing and renames, and signal this process at the given time."""
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "os.rename" or (event == "open" and isinstance(args[1], str) and args[1][0] in "wax")
        if writes and str(args[0]).startswith(str(path)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), with_signal)

    sys.addaudithook(hook)


def _do(plan: dict[str, Any], out: str | None, stop_at: int, with_signal: int, die: tuple[int, float] | None) -> int:
    from atoll import AtollError, Plan, run

    path = Path(out) if out else None
    if path is not None and stop_at:
        _stop_at(stop_at, path, with_signal)
    resume = path is not None and (path / "plan.toml").exists()
    try:
        report = stop_at > 0  # one more write to be stopped at
        watch = [Teller(die)]
        result = run(Plan.read(plan), out=path, resume=resume, watch=watch, checkpoint_seconds=0, report=report)
    except AtollError as error:
        say(f"error {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if result.reason == "interrupted":
        return 130
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        say(f"peak {resource.getrusage(who).ru_maxrss // 1024}")
    return 0


def _serve() -> None:
    import dp_accounting  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg  # noqa: F401

    import atoll.api
    import atoll.report.html
    import atoll.report.notebook  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run in the background
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_do(**request))
        say(f"started {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    _serve()
