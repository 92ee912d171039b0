"""`atoll ui`: the live page of runs and federations; `atoll access`: who may open it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.serve import server_packages
from atoll.core.errors import RunError

if TYPE_CHECKING:
    from atoll.ui.beside import PageBeside

HOURS = 24.0
access_app = typer.Typer(help="Links to the live page: make, list and revoke them.", no_args_is_help=True)


class RoleName(StrEnum):
    """Roles of a link."""

    VIEWER = "viewer"
    OPERATOR = "operator"


PlaceArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory of runs, or the home of a federation's server.")
]


def ui(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory of runs, one run, or the home of a federation's server.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address of the page; anything but this machine needs --cert.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port of the page; 0 for any.")] = 0,
    name: Annotated[list[str] | None, typer.Option(help="A name that browsers reach it by. May be repeated.")] = None,
    cert: Annotated[Path | None, typer.Option(help="A certificate, e.g. of atoll certs.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
) -> None:
    """Show runs in a browser as they train. Of a running federation, print the link of its server's page."""
    from atoll.network.protocol.operator import address_of

    with server_packages():
        from atoll.network.server.access import Access
        from atoll.network.server.web import tls_context
        from atoll.ui.serving import local_link, serve_runs

    if _is_home(directory):
        print(local_link(Access(directory), int(address_of(directory).url.rpartition(":")[2])))
        return
    if (cert is None) != (key is None):
        raise RunError("--cert and --key belong together: give both, e.g. of atoll certs")
    tls = tls_context(cert, key) if cert is not None and key is not None else None

    def ready(link: str) -> None:
        print(f"{link}\nCtrl-C ends the page; runs go on", flush=True)

    serve_runs(directory, host=host, port=port, tls=tls, names=name or (), ready=ready)


@contextmanager
def page_beside(directory: Path, port: int, *, among_others: bool) -> Iterator[PageBeside]:
    """Serve a page beside a run; when it has ended, the page stays until Ctrl-C."""
    with server_packages():
        import atoll.ui.serving  # noqa: F401  (what its process needs)
        from atoll.ui.beside import PageBeside

    page = PageBeside(directory.parent if among_others else directory, directory.resolve().name, port)
    print(f"live page {page.link}", flush=True)
    try:
        yield page
    except BaseException:
        page.close()
        raise
    print("the live page stays until Ctrl-C", flush=True)
    page.wait()


@access_app.command("add")
def add(
    directory: PlaceArgument,
    name: Annotated[str, typer.Option(help="Whose link it is; actions are recorded by this name.")],
    role: Annotated[RoleName, typer.Option(help="What the link allows.")] = RoleName.VIEWER,
    hours: Annotated[float, typer.Option(help="How long it lasts.")] = HOURS,
) -> None:
    """Make a link that opens one browser, to be put behind the page's address."""
    from atoll.network.protocol import operator_endpoints as endpoints
    from atoll.network.protocol.operator import address_of, ask

    with server_packages():
        from atoll.network.server.access import Access, Role

    if _is_home(directory):  # the server records it in its ledger
        body = endpoints.NewAccess(name=name, role=role.value, hours=hours)
        given = ask(address_of(directory), endpoints.GIVE_ACCESS, body)
        text, number = given["token"], given["id"]
    else:
        text, token = Access(directory).add(name, Role(role), hours * 3600)
        number = token.id
    print(f"/ui/#token={text}")
    print(f"for {name}, {role.value}, {hours:g} hours; to revoke it: atoll access revoke {directory} {number}")


@access_app.command("list")
def show(directory: PlaceArgument) -> None:
    """List the links that have not expired."""
    with server_packages():
        from atoll.network.server.access import Access

    for token in Access(directory).tokens():
        until = datetime.datetime.fromtimestamp(token.expires, datetime.UTC).strftime("%Y-%m-%d %H:%M")
        used = "used" if token.used else "not used"
        print(f"{token.id}  {token.role:8}  until {until} UTC  {used:8}  {token.name}")


@access_app.command()
def revoke(directory: PlaceArgument, token: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a link, and end the sessions that it opened."""
    from atoll.network.protocol import operator_endpoints as endpoints
    from atoll.network.protocol.operator import address_of, ask

    with server_packages():
        from atoll.network.server.access import Access

    if _is_home(directory):
        ask(address_of(directory), endpoints.REVOKE_ACCESS, endpoints.AccessId(id=token))
    else:
        Access(directory).revoke(token)


def _is_home(directory: Path) -> bool:
    """Return whether this is the home of a federation's server."""
    from atoll.network.protocol.operator import ADDRESS

    if not directory.is_dir():
        raise RunError(f"{directory} is no directory: name one of runs, or the home of a server")
    return (directory / ADDRESS).is_file()
