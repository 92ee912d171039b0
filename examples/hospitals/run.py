"""Two hospitals and a server, each a process of its own, over TLS on this machine. Run: make federation

Every command is printed as it would be typed in three terminals; docs/federation.md explains them.
"""

import json
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from atoll.report.record import next_free

ATOLL = str(Path(sys.executable).with_name("atoll"))
SECONDS = 300
CLIENTS = {"hospital-a": "hospital:client_a", "hospital-b": "hospital:client_b"}


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


def main() -> None:
    """Set up, train, check."""
    here, base = Path(__file__).parent, next_free(Path("runs"), "federation").resolve()
    base.mkdir(parents=True)
    for name in ("plan.toml", "hospital.py"):
        shutil.copy(here / name, base)
    print(f"everything happens in {base}")
    with ExitStack() as running:
        terminals = Terminals(base, running)
        terminals.done("operator", "certs certs --host 127.0.0.1")
        keys = "--cert certs/server.pem --key certs/server.key"
        serving = terminals.started(
            "operator", f"serve plan.toml --home server --port 0 --clients 2 {keys}", "server.log"
        )
        assert serving.stdout is not None
        url = serving.stdout.readline().split()[1].rstrip(",")
        for name in CLIENTS:
            token = terminals.done("operator", "clients token --home server")
            terminals.done(name, f"enrol {url} --token={token} --name {name} --home {name} --ca certs/ca.pem")
        terminals.done("operator", f"clients approve {' '.join(CLIENTS)} --home server")
        working = [terminals.started(name, f"join --home {name} --app {app} --once") for name, app in CLIENTS.items()]
        codes = [process.wait(SECONDS) for process in working]
        if any(codes):
            raise SystemExit(f"a hospital failed: see above, and {base}/server.log")
        terminals.done("operator", "status --home server")
        terminals.done("operator", "stop --home server")
        serving.wait(SECONDS)
        terminals.done("hospital-a", "ledger verify hospital-a/runs/hospitals --head server/runs/hospitals")
        terminals.done("operator", "report server/runs/hospitals")
    test = json.loads((base / "server/runs/hospitals/result.json").read_text())["test"]
    print(f"test accuracy {100 * test['accuracy']:.2f} % of one model, and no sample has left its hospital")


if __name__ == "__main__":
    main()
