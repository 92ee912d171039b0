"""A process that imports everything once and then forks a command for each that it is told to start.

A fork costs milliseconds where a fresh interpreter with torch costs seconds; what is forked is a process of its own,
with its own sockets, files and memory, that is killed like any other. Requests and answers are lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """The test's side of one command."""

    def __init__(self, fork_server: ForkServer, pid: int, out: Path) -> None:
        self._fork_server, self.pid, self.out = fork_server, pid, out

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal if one ended it; None while it runs."""
        return self._fork_server.code(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> int:
        """End it as abruptly as can be; its exit code, which tells whether it had ended by itself before."""
        self.signal(signal.SIGKILL)
        return self.wait(30)

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended by itself."""
        code = self._fork_server.wait(self.pid, seconds)
        assert code is not None, f"process {self.pid} does not end:\n{self.said}"
        return code

    @property
    def said(self) -> str:
        """All that it printed."""
        return self.out.read_text(errors="replace") if self.out.exists() else ""


class ForkServer:
    """The test's side of the process that forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._codes, self._started = process, dict[int, int](), list[int]()
        self._heard, self._one_at_a_time = threading.Condition(), threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        argv: Sequence[str],
        out: Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        die_at: int = 0,
        in_background: bool = False,
        max_files: int = 0,
        err: Path | None = None,
        python: bool = False,
    ) -> ForkedProcess:
        """Run `atoll` with these arguments, or `python`: a script, or a module after `-m`.

        With `die_at` it kills itself when it changes files for that time.

        It hears Ctrl-C as in a terminal, wherever the tests run, unless it is `in_background` as with nohup. With
        `max_files` it may have so many files open, as after `ulimit -n`. Errors go to `out` unless `err` is given.
        """
        assert self._process.stdin is not None
        request = {"argv": list(argv), "out": str(out), "cwd": str(cwd), "env": dict(env or {}), "die_at": die_at}
        request |= {"in_background": in_background, "max_files": max_files, "err": str(err or out), "python": python}
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            with self._heard:
                assert self._heard.wait_for(lambda: self._started, 60), "the nursery does not answer"
                return ForkedProcess(self, self._started.pop(), out)

    def code(self, pid: int) -> int | None:
        with self._heard:
            return self._codes.get(pid)

    def wait(self, pid: int, seconds: float) -> int | None:
        with self._heard:
            self._heard.wait_for(lambda: pid in self._codes, seconds)
            return self._codes.get(pid)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, pid, *rest = line.split()
            with self._heard:
                if word == "started":
                    self._codes.pop(int(pid), None)  # the system may use a number again
                    self._started.append(int(pid))
                else:
                    self._codes[int(pid)] = int(rest[0])
                self._heard.notify_all()


@contextlib.contextmanager
def fork_server(*modules: str) -> Iterator[ForkServer]:
    """Start one, which also imports `modules`.

    Whatever it started ends with it, and it ends with the test, however that does.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__, *modules], env=env, **pipes) as process:
        try:
            yield ForkServer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(request: dict[str, Any]) -> int:
    """Be the command."""
    _die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["in_background"] else signal.default_int_handler)
    if request["max_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["max_files"],) * 2)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    random.seed()
    nothing, append = os.open(os.devnull, os.O_RDONLY), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    out, err = os.open(request["out"], append), os.open(request["err"], append)
    for number, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(number, target)
    os.closerange(3, 1000)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so that a test can ask where it hangs
    if request["die_at"]:
        _die_at(request["die_at"], request["cwd"])
    try:
        _run(request["argv"], request["python"])
    except SystemExit as end:
        code = end.code
        return code if isinstance(code, int) else 0 if code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1 if request["python"] else 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(argv: list[str], python: bool) -> None:
    if not python:
        from atoll.cli.main import main

        sys.argv = ["atoll", *argv]
        main()
        return
    named = argv[0] == "-m"
    sys.argv = argv[1:] if named else argv
    first = Path.cwd() if named else Path(argv[0]).resolve().parent
    sys.path[:0] = [str(first), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if named:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _die_at(number: int, folder: str) -> None:
    """Die when Python is about to open for writing, rename, remove or make something in a folder for that time."""
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
        changes |= event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(args[0]).startswith(folder):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


LAZY = (
    *("dp_accounting", "httpcore2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "psycopg"),
    *("pydantic", "sklearn.datasets", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite"),
)
"""What commands import once they need it."""
PAUSES = {
    "atoll.network.client.connection": {"FIRST_PAUSE": 0.1},
    "atoll.network.server.auth": {"APPROVAL_SECONDS": 0.5},
    "atoll.network.server.serving": {"CHECK_SECONDS": 0.05},
}
"""Seconds after which a process looks again, so that no test waits for them as long as people do."""


def _load() -> None:
    """Import all that commands import."""
    import torch

    import atoll

    members = [module.name for module in pkgutil.walk_packages(atoll.__path__, "atoll.")]
    for name in (*LAZY, *members, *sys.argv[1:]):
        importlib.import_module(name)
    for name, constants in PAUSES.items():
        vars(sys.modules[name]).update(constants)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    torch.set_num_threads(1)


def _serve() -> None:
    _die_with_parent()
    _load()
    children: dict[int, int] = {}
    buffered = b""
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for handle in ready:
            if handle:
                pid = children.pop(handle)
                os.close(handle)
                print("ended", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                os._exit(0)  # children die with their parent
            *lines, buffered = (buffered + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    os._exit(_child(json.loads(line)))
                children[os.pidfd_open(pid)] = pid
                print("started", pid, flush=True)


if __name__ == "__main__":
    _serve()
