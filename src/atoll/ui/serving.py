"""The process of a page on one machine: a directory of runs, or a simulation that feeds it through a pipe."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from atoll.core.errors import RunError
from atoll.network.server.access import Access, Role
from atoll.network.server.web import WebServer, listening_socket, web_server
from atoll.ui.app import LOOPBACK, Page
from atoll.ui.local import LocalRuns, WatchedSimulation
from atoll.ui.runs import RunsDirectory, Status

LOCAL_SECONDS = 30 * 86400.0
"""How long the link of a machine's own user lasts."""


def local_link(access: Access, port: int, to: str = "") -> str:
    """Return a link that opens the page on this machine without further ceremony."""
    text, _ = access.add("this machine", Role.OPERATOR, LOCAL_SECONDS, reusable=True)
    return f"http://127.0.0.1:{port}/ui/#token={text}" + (f"&to={to}" if to else "")


def page_server(
    page: Page, host: str, port: int, tls: ssl.SSLContext | None, names: Sequence[str]
) -> tuple[WebServer, socket.socket]:
    """Make the server of a page and its socket; with port 0 the system chooses one."""
    server = web_server(Starlette(routes=page.routes()), host, port, tls)
    listener = listening_socket(host, port)
    page.serve_at(listener.getsockname()[1], [*LOOPBACK, *([host] if host not in ("0.0.0.0", "::") else []), *names])  # noqa: S104
    return server, listener


def serve_runs(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    names: Sequence[str] = (),
    simulation: WatchedSimulation | None = None,
    to: str = "",
    ready: Callable[[str], None],
) -> None:
    """Serve the page of a directory of runs until SIGINT or SIGTERM; `ready` is given the link for this machine."""
    if not directory.is_dir():
        raise RunError(f"{directory} is no directory: name one that holds runs, such as runs")
    access = Access(directory)
    runs = RunsDirectory(directory, simulation)
    page = Page(simulation or LocalRuns(access), runs, access, title=directory.resolve().name)
    server, listener = page_server(page, host, port, tls, names)
    number = listener.getsockname()[1]
    if host in LOOPBACK:
        ready(local_link(access, number, to))
    else:
        ready(f"https://{(names or [host])[0]}:{number}/ui/")
    asyncio.run(_serve(server, listener, page))


async def _serve(server: WebServer, listener: socket.socket, page: Page) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        page.close()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await server._serve([listener])


def main(arguments: Sequence[str]) -> None:
    """Serve a simulation's page: states come in on standard input, the link and `stop` go out on standard output.

    It is a process of its own, so that pages cost the simulation no time of its interpreter, and nothing is forked.
    """
    directory, run, port = arguments

    def say(**message: str) -> None:
        print(json.dumps(message), flush=True)

    simulation = WatchedSimulation(Access(Path(directory)), run, lambda: say(do="stop"))

    def read() -> None:
        for line in sys.stdin:
            fields: dict[str, Any] = json.loads(line)
            simulation.update(Status(fields["status"], fields["live"]))
        signal.raise_signal(signal.SIGTERM)  # whoever started it is gone

    threading.Thread(target=read, daemon=True).start()
    serve_runs(
        Path(directory), port=int(port), simulation=simulation, to=f"/run/{run}", ready=lambda link: say(link=link)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
