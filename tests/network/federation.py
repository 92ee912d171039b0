"""A real federation for tests: a server process with TLS and a store, and client processes with data of their own."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from network.apps import NUMBER, PLAN
from network.fork_server import ForkedProcess, ForkServer

from atoll import Plan, run
from atoll.cli.join import enrol
from atoll.ledger.audit import Findings, audit
from atoll.network.client.home import RunHome
from atoll.network.protocol.identity import load_key, public_bytes
from atoll.network.protocol.operator import Address, ask, read_token
from atoll.network.protocol.operator_endpoints import ENDPOINTS
from atoll.network.server.certs import make_certificates

RUN = "law"
"""What runs are called here."""


def certificates(directory: Path) -> Path:
    """Certificates for this machine."""
    make_certificates(directory, ["localhost", "127.0.0.1"], datetime.datetime.now(datetime.UTC))
    return directory


_held: deque[socket.socket] = deque()


def free_port() -> int:
    """A port that nobody uses, that the system gives to nobody by itself, and that no other test is told for a while.

    A socket that is bound to it and does not listen keeps it: a server may listen there, but nobody gets it from here.
    """
    while True:
        port, holder = random.randrange(20000, 32000), socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(holder)
        if len(_held) > 64:
            _held.popleft().close()
        return port


def until(done: Callable[[], Any], seconds: float, what: str | Callable[[], str] = "") -> Any:
    """Wait for something to come true; what it gave. If it does not, `what` says what was waited for."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, f"waited {seconds} s for {(what() if callable(what) else what) or done}"
        time.sleep(0.02)
    return found


class Federation:
    """A server and its clients, in one directory. Nothing of it outlives `with federation(...)`."""

    def __init__(self, root: Path, fork_server: ForkServer, certs: Path, store: str | None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.fork_server, self.certs, self.store = root, fork_server, certs, store
        self.port, self.admin_port = free_port(), free_port()
        self.home, self.url = root / "server", f"https://localhost:{self.port}"
        self.server: ForkedProcess | None = None
        self.clients: dict[int, ForkedProcess] = {}
        self.env: dict[str, str] = {}
        """What the server finds in its environment beside what tests have in theirs."""
        self._all: list[ForkedProcess] = []

    def write(self, plan: Plan) -> None:
        """Say what is served, and what clients' samples are dealt by."""
        (self.root / "plan.toml").write_text(plan.to_toml())

    def serve(
        self,
        *options: str,
        plan: bool = True,
        ready: bool = True,
        die_at: int = 0,
        in_background: bool = False,
        max_files: int = 0,
    ) -> ForkedProcess:
        """Start the server, or start it again, with the plan or without; wait until it is `ready` to answer."""
        argv = ["serve", *(["plan.toml", "--name", RUN] if plan else []), "--home", str(self.home)]
        argv += ["--host", "localhost", "--port", str(self.port), "--admin-port", str(self.admin_port)]
        argv += ["--cert", str(self.certs / "server.pem"), "--key", str(self.certs / "server.key"), *options]
        argv += ["--store", self.store] if self.store else []
        self.server = self._start(argv, "server.out", self.env, die_at, in_background, max_files)
        if ready:
            self.ready()
        return self.server

    def ready(self) -> None:
        """Wait until the server takes requests."""
        server = self.server
        assert server is not None

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.admin_port)):
                return True
            return False

        until(lambda: server.code is not None or listens(), 60, "the server")
        assert server.code is None, server.said

    def operate(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the server answers to its operator."""
        endpoint = next(each for each in ENDPOINTS if (each.method, each.path) == (method, path))
        token = read_token(self.home / "operator.token")
        known: dict[str, Any] = ask(Address(f"http://127.0.0.1:{self.admin_port}", token), endpoint, body)
        return known

    def health(self) -> tuple[int, str]:
        """What a watchman sees."""
        import httpx2

        answer = httpx2.get(f"http://127.0.0.1:{self.admin_port}/health", trust_env=False)
        return answer.status_code, answer.text

    def enrol(self, num: int, *, approve: bool = True) -> None:
        """Let clients 0, 1, ... enrol and be approved, in this order, so that these are their numbers in plans."""
        names = [f"c{number}" for number in range(num)]
        for name in names:
            token = self.operate("POST", "/clients/token", {"seconds": 600})["token"]
            with contextlib.redirect_stdout(io.StringIO()):
                enrol(self.url, token, name, self.root / name, self.certs / "ca.pem")
        if approve:
            assert self.operate("POST", "/clients/approve", {"names": names})["numbers"] == list(range(num))

    def join(
        self,
        number: int,
        *options: str,
        app: str = "network.apps:client",
        home: str = "",
        once: bool = True,
        die_at: int = 0,
        in_background: bool = False,
    ) -> ForkedProcess:
        """Start a client, or start it again."""
        name = home or f"c{number}"
        argv = ["join", "--home", str(self.root / name), "--app", app, *(["--once"] if once else []), *options]
        argv += [] if "--runs" in options else ["--all-runs"]
        env = {PLAN: str(self.root / "plan.toml"), NUMBER: str(number)}
        child = self._start(argv, f"{name}.out", env, die_at, in_background)
        if not home:
            self.clients[number] = child
        return child

    def add(self, run: str, plan: Plan) -> None:
        """Begin another run."""
        self.operate("POST", "/runs", {"run": run, "plan": plan.to_dict()})

    def status(self, run: str = RUN) -> dict[str, Any]:
        """Where a run stands."""
        found: dict[str, Any] = next(each for each in self.operate("GET", "/status")["runs"] if each["run"] == run)
        return found

    def wait_for(self, run: str, seconds: float) -> str:
        """Wait until a run is over; why it is."""
        end = time.monotonic() + seconds
        while (status := self.status(run))["status"] == "running":
            assert time.monotonic() < end, f"{status} after {seconds} s\n{self.said()}"
            time.sleep(0.05)
        return str(status["status"])

    def wait(self, seconds: float) -> None:
        """Wait until server and clients end by themselves, as they do with --once when the run is over."""
        end = time.monotonic() + seconds
        assert self.server is not None
        for child in (self.server, *self.clients.values()):
            code = self.fork_server.wait(child.pid, max(0.0, end - time.monotonic()))
            assert code == 0, f"{code} after {seconds} s\n{self.said()}"

    def run_to_end(self, num_clients: int, seconds: float = 60.0, *options: str) -> None:
        """Serve, enrol, join, and wait."""
        self.serve("--clients", str(num_clients), "--once", *options)
        self.enrol(num_clients)
        for number in range(num_clients):
            self.join(number)
        self.wait(seconds)

    def directory(self, run: str = RUN) -> Path:
        """The directory of a run."""
        return self.home / "runs" / run

    def model(self, run: str = RUN) -> bytes:
        """The model that a run ended with."""
        return (self.directory(run) / "model.safetensors").read_bytes()

    def rows(self, run: str = RUN) -> list[dict[str, Any]]:
        """The metrics of a run."""
        return [json.loads(line) for line in (self.directory(run) / "metrics.jsonl").read_text().splitlines()]

    def lines(self, run: str = RUN) -> list[str]:
        """A run's ledger, from its file."""
        path = self.directory(run) / "ledger.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def commits(self, run: str = RUN) -> list[dict[str, Any]]:
        """What the ledger says of every version."""
        bodies = [json.loads(line) for line in self.lines(run)]
        return [record["body"] for record in bodies if record["kind"] == "commit"]

    def audited(self, run: str = RUN) -> Findings:
        """The ledger's own account, once it holds, also against the heads that clients have seen."""
        homes = [RunHome(path) for path in self.root.glob(f"c*/runs/{run}")]
        key = public_bytes(load_key(self.home / "ledger.key"))
        found = audit(self.lines(run), key, [home.head for home in homes])
        assert isinstance(found, Findings), found
        return found

    def said(self) -> str:
        """Return the end of what everybody printed, and where the server is; only for a test that has failed.

        Asking a process for the stacks of its running threads may crash it: nothing stops them while they are read.
        """
        if self.server is not None:
            self.server.signal(signal.SIGUSR1)
            time.sleep(0.2)
        outs = sorted(self.root.glob("*.out"))
        return "\n".join(f"--- {out.name}\n{out.read_text(errors='replace')[-6000:]}" for out in outs)

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        for child in self._all:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGKILL)
        for child in self._all:
            child.wait(30)

    def _start(
        self,
        argv: list[str],
        out: str,
        env: dict[str, str],
        die_at: int = 0,
        in_background: bool = False,
        max_files: int = 0,
    ) -> ForkedProcess:
        child = self.fork_server.start(argv, self.root / out, self.root, env, die_at, in_background, max_files)
        self._all.append(child)
        return child


@contextlib.contextmanager
def federation(
    root: Path, fork_server: ForkServer, certs: Path, plan: Plan, store: str | None = None
) -> Iterator[Federation]:
    """A federation for this plan, of which nothing runs yet."""
    made = Federation(root, fork_server, certs, store)
    made.write(plan)
    try:
        yield made
    finally:
        made.stop()


def simulated(plan: Plan, path: Path) -> bytes:
    """The model that the same plan ends with in one process."""
    run(plan.replace({"engine": "inline"}), out=path, report=False)
    return (path / "model.safetensors").read_bytes()


def memory_of(pid: int) -> int:
    """Bytes that a process has in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
