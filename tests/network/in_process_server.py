"""A server's hub at work, its operator's address, its address for clients, and clients, all within this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.federation import until

from atoll.network.client.app import ClientApp
from atoll.network.client.client import Client, OwnerOutput
from atoll.network.client.connection import Connection
from atoll.network.client.consent import every_run
from atoll.network.client.home import EnrolledServer, Home
from atoll.network.protocol.identity import enrolment, public_bytes
from atoll.network.server.admin import open_admin
from atoll.network.server.http import ClientApi
from atoll.network.server.operations import Operations
from atoll.network.server.runs import Run
from atoll.network.server.store import Store
from atoll.network.server.web import listening_socket, web_server


def enrol(operations: Operations, name: str, token: str) -> str:
    """Let a new client ask to be let in; its id."""
    key = Ed25519PrivateKey.generate()
    public = public_bytes(key)
    return operations.authenticator.enrol(token, name, public, key.sign(enrolment(token, name, public)))


@contextmanager
def operated(home: Path, num_clients: int = 1) -> Iterator[Operations]:
    """A hub at work; its operator's address is in its home, until it is told to shut down."""
    home.mkdir(exist_ok=True)
    operations = Operations(home, Store(f"sqlite:///{home}/store.db"), num_clients=num_clients)
    server, listener = open_admin(operations, home, 0)
    operations.on_shut_down = lambda: setattr(server, "should_exit", True)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    operations.start()
    thread.start()
    try:
        yield operations
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        operations.close()


@contextmanager
def serving(operations: Operations) -> Iterator[str]:
    """Let clients reach a hub that is at work; its address."""
    api, listener = ClientApi(operations), listening_socket("127.0.0.1", 0)
    server = web_server(api.app, "127.0.0.1", 0, None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        api.end()
        server.should_exit = True
        thread.join()
        listener.close()


def enrolled(operations: Operations, url: str, path: Path) -> Home:
    """The home of a client that enrols and is approved."""
    home = Home.make(path)
    with Connection(url, home.key, keep_trying=False) as connection:
        id = connection.enrol(operations.token(60), path.name)
        home.enrolled(EnrolledServer(url, connection.about().server_key, id, path.name))
    operations.approve([id])
    return home


def client_of(
    operations: Operations, url: str, path: Path, app: ClientApp, warn: Callable[[str], None] = lambda text: None
) -> threading.Thread:
    """A client that enrols, is approved, and works in a thread of its own until all runs are over."""
    return at_work(enrolled(operations, url, path), url, app, warn)


def at_work(home: Home, url: str, app: ClientApp, warn: Callable[[str], None] = lambda text: None) -> threading.Thread:
    """An approved client, which works in a thread of its own until all runs are over."""

    def work() -> None:
        quiet = OwnerOutput(lambda text: None, warn)
        with Connection(url, home.key, server_key=home.server().server_key, say=quiet.info) as connection:
            Client(
                app, home, connection, quiet, sleep=lambda seconds: time.sleep(min(seconds, 0.01)), consent=every_run
            ).run(once=True)
        home.close()

    return threading.Thread(target=work)


def built_run(operations: Operations, name: str) -> Run:
    """Wait until a run is built, and return it."""
    run: Run = until(lambda: next((run for run in operations.driver.built_runs() if run.name == name), None), 60, name)
    return run
