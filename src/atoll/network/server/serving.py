"""The server process: an address for clients, one for the operator, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.routing import Route

from atoll.core.errors import RunError
from atoll.network.server.admin import open_admin
from atoll.network.server.http import ClientApi
from atoll.network.server.limits import connection_limits, raise_file_limit
from atoll.network.server.monitoring import RateLimitedLog, log_errors_of
from atoll.network.server.operations import Operations
from atoll.network.server.web import listening_socket, web_server

GC_THRESHOLD = 50_000
"""Allocations between two garbage collections, which take long in a server with many clients."""
CHECK_SECONDS = 0.5
"""Seconds between two checks whether all runs have ended."""


class LivePage(Protocol):
    """A page that is served at the operator's address."""

    def routes(self) -> list[Route]:
        """Return its routes."""

    def serve_at(self, port: int) -> None:
        """Take note of the port at which browsers on this machine reach it."""

    def close(self) -> None:
        """End its streams."""


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Lock a home for this process; the system releases the lock when it ends."""
    home.mkdir(0o700, parents=True, exist_ok=True)
    with (home / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another server uses {home}: stop it with atoll stop, or name another --home") from error
        yield


def serve(
    operations: Operations,
    home: Path,
    *,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    admin_port: int,
    once: bool = False,
    page: LivePage | None = None,
    more: Sequence[tuple[uvicorn.Server, socket.socket]] = (),
) -> None:
    """Serve until stopped; with `once`, until all runs have ended and all online clients know it.

    The live `page` is served at the operator's address; `more` are further servers of this process.
    """
    log_errors_of("uvicorn.error")
    api = ClientApi(operations)
    public = web_server(api.app, host, port, tls, limits=connection_limits(raise_file_limit()))
    listener = listening_socket(host, port)
    admin = open_admin(operations, home, admin_port, more=page.routes() if page is not None else ())
    if page is not None:
        page.serve_at(admin[1].getsockname()[1])
    print(f"serving {'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}, home {home}", flush=True)
    asyncio.run(_serve(operations, api, [(public, listener), admin, *more], once, page))
    if operations.failure:
        raise RunError(operations.failure)


async def _serve(
    operations: Operations,
    api: ClientApi,
    pairs: Sequence[tuple[Any, socket.socket]],
    once: bool,
    page: LivePage | None,
) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        api.end()
        if page is not None:
            page.close()
        for server, _ in pairs:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, operations.shut_down)

    def end_soon() -> None:
        loop.call_soon_threadsafe(end)

    operations.on_shut_down = end_soon
    trouble = RateLimitedLog()
    loop.set_exception_handler(lambda _, about: trouble.write(f"{about['message']}: {about.get('exception')!r}"))
    gc.set_threshold(GC_THRESHOLD)
    operations.start()
    try:
        serving = [asyncio.create_task(server._serve([listener])) for server, listener in pairs]
        watching = asyncio.create_task(_until_over(operations)) if once else None
        await asyncio.gather(*serving)
        if watching is not None:
            watching.cancel()
    finally:
        api.close()
        await asyncio.to_thread(operations.close)


async def _until_over(operations: Operations) -> None:
    while not operations.all_runs_over:
        await asyncio.sleep(CHECK_SECONDS)
    operations.shut_down()
