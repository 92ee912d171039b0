"""A server's hub whose operator's address listens; clients enrol by a call instead of a connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.network.admin import open_admin
from atoll.network.gate import enrolment
from atoll.network.hub import Hub
from atoll.network.identity import public_bytes
from atoll.network.store import Store


def enrol(hub: Hub, name: str, token: str) -> str:
    """Let a new client ask to be let in; its id."""
    key = Ed25519PrivateKey.generate()
    public = public_bytes(key)
    return hub.gate.enrol(token, name, public, key.sign(enrolment(token, name, public)))


@contextmanager
def operated(home: Path) -> Iterator[Hub]:
    """A hub at work; its operator's address is in its home, until it is told to shut down."""
    home.mkdir(exist_ok=True)
    hub = Hub(home, Store(f"sqlite:///{home}/store.db"))
    server, listener = open_admin(hub, home, 0)
    hub.on_shut_down = lambda: setattr(server, "should_exit", True)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    hub.start()
    thread.start()
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        hub.close()
