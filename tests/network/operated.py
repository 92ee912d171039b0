"""A server that an operator can be tried on: a real store and a real gate, and runs that nobody trains."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.network.admin import open_admin
from atoll.network.gate import Gate, enrolment, token_hash
from atoll.network.identity import public_bytes
from atoll.network.metrics import Metrics
from atoll.network.store import Store


class StandIn:
    """Clients enrol and are approved for real; a run is what it was told to be."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.metrics, self.store = Metrics(), Store(f"sqlite:///{home}/store.db")
        self.gate = Gate(self.store, time.time)
        self.plans: dict[str, Plan] = {}
        self.ended: set[str] = set()
        self.why = ""
        self.stopped = threading.Event()

    def enrol(self, name: str, token: str) -> str:
        key = Ed25519PrivateKey.generate()
        public = public_bytes(key)
        return self.gate.enrol(token, name, public, key.sign(enrolment(token, name, public)))

    def status(self) -> dict[str, Any]:
        rows = [row["status"] for row in self.clients()]
        counts = {status: rows.count(status) for status in ("approved", "pending", "revoked")}
        return {
            "server": {"seconds_up": 75.0, "read_only": bool(self.why), "why": self.why},
            "runs": [self._run(name) for name in sorted(self.plans)],
            "clients": {**counts, "quarantined": 0, "online": 0},
        }

    def clients(self) -> list[dict[str, Any]]:
        with self.store.look() as book:
            rows = book.clients()
        return [
            {
                "id": row.id,
                "name": row.name,
                "number": row.number,
                "status": str(row.status),
                "offences": row.offences,
                "online": False,
                "seconds_since": None,
            }
            for row in rows
        ]

    def approve(self, names: list[str]) -> list[int]:
        with self.store.change() as book:
            return [book.approve(self._id(name)) for name in names]

    def revoke(self, name: str) -> None:
        with self.store.change() as book:
            book.revoke(self._id(name))

    def token(self, seconds: float) -> str:
        made = secrets.token_urlsafe(16)
        with self.store.change() as book:
            book.add_token(token_hash(made), time.time() + seconds)
        return made

    def add_run(self, run: str, plan: Plan) -> None:
        if run in self.plans:
            raise RunError(f"there is a run {run} already: choose another name")
        self.plans[run] = plan

    def stop_run(self, run: str) -> None:
        if run not in self.plans:
            raise RunError(f"there is no run {run}: see atoll runs list")
        self.ended.add(run)

    def lines(self, run: str) -> list[str]:
        with self.store.look() as book:
            return book.lines(run)

    def shut_down(self) -> None:
        self.stopped.set()

    def _id(self, name: str) -> str:
        for row in self.clients():
            if name in (row["name"], row["id"]):
                return str(row["id"])
        raise RunError(f"there is no client {name}: see atoll clients list")

    def _run(self, name: str) -> dict[str, Any]:
        return {
            "run": name,
            "status": "interrupted" if name in self.ended else "running",
            "round": 3,
            "rounds": self.plans[name].rounds,
            "attempt": 4,
            "phase": "collecting",
            "asked": 2,
            "arrived": 1,
            "accuracy": 0.5,
            "epsilon": None,
            "seconds_waiting": 12.0,
        }


@contextmanager
def operated(home: Path) -> Iterator[StandIn]:
    """A server at work, whose operator's address is in its home; it ends when it is told to."""
    hub = StandIn(home)
    server, listener = open_admin(hub, home, 0)

    async def serve() -> None:
        work = asyncio.create_task(server.serve([listener]))
        while not hub.stopped.is_set() and not server.should_exit:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await work

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        hub.store.close()
