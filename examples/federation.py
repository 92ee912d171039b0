"""A server and its clients, each a process of its own, over TLS on this machine; the examples here use it."""

import json
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from atoll.report.record import next_free

ATOLL = str(Path(sys.executable).with_name("atoll"))
SECONDS = 300


class Terminals:
    """Runs commands in a directory, and shows who typed what and what came of it."""

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self.directory, self.running = directory, running

    def done(self, who: str, command: str) -> str:
        """Run a command to its end; what it printed."""
        process = self._begun(who, command)
        told = process.communicate(timeout=SECONDS)[0]
        _show(who, told.splitlines())
        if process.returncode:
            raise SystemExit(f"{who}'s command failed: see above")
        return told.strip()

    def started(self, who: str, command: str, log: str | None = None) -> subprocess.Popen[str]:
        """Start a command that goes on; it is ended with this script, however that ends."""
        process = self._begun(who, command, log)
        self.running.enter_context(process)
        self.running.callback(process.terminate)
        if log is None:
            threading.Thread(target=_show, args=(who, process.stdout)).start()
        return process

    def _begun(self, who: str, command: str, log: str | None = None) -> subprocess.Popen[str]:
        print(f"{who:>10} $ atoll {command}", flush=True)
        errors = None if log is None else self.running.enter_context((self.directory / log).open("w"))
        argv, pipe = [ATOLL, *shlex.split(command)], subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.directory, text=True, stdout=pipe, stderr=errors)


def _show(who: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{who:>10} | {line.rstrip()}", flush=True)


def run_federation(
    files: list[Path], clients: dict[str, str], run: str, before: Callable[[Terminals], None] = lambda terminals: None
) -> float:
    """Set up, train, check; the accuracy of the model on the server's test data.

    `files` are the plan and the module of the apps, `clients` the app of each client, `run` the name in the plan;
    `before` does what clients agree on among themselves.
    """
    base = next_free(Path("runs"), "federation").resolve()
    base.mkdir(parents=True)
    for path in files:
        shutil.copy(path, base)
    print(f"everything happens in {base}")
    first = next(iter(clients))
    with ExitStack() as running:
        terminals = Terminals(base, running)
        before(terminals)
        terminals.done("operator", "certs certs --host 127.0.0.1")
        keys = "--cert certs/server.pem --key certs/server.key"
        serving = terminals.started(
            "operator", f"serve plan.toml --home server --port 0 --clients {len(clients)} {keys}", "server.log"
        )
        assert serving.stdout is not None
        url = serving.stdout.readline().split()[1].rstrip(",")
        for name in clients:
            token = terminals.done("operator", "clients token --home server")
            terminals.done(name, f"enrol {url} --token={token} --name {name} --home {name} --ca certs/ca.pem")
        terminals.done("operator", f"clients approve {' '.join(clients)} --home server")
        working = [terminals.started(name, f"join --home {name} --app {app} --once") for name, app in clients.items()]
        codes = [process.wait(SECONDS) for process in working]
        if any(codes):
            raise SystemExit(f"a client failed: see above, and {base}/server.log")
        terminals.done("operator", "status --home server")
        terminals.done("operator", "stop --home server")
        serving.wait(SECONDS)
        terminals.done(first, f"ledger verify {first}/runs/{run} --head server/runs/{run}")
        terminals.done("operator", f"report server/runs/{run}")
    test = json.loads((base / f"server/runs/{run}/result.json").read_text())["test"]
    accuracy: float = test["accuracy"]
    return accuracy
