"""The command `atoll serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings
from atoll.core.errors import RunError

if TYPE_CHECKING:
    from atoll.core.plan import Plan


def serve(  # long, since each option of the command is a parameter
    plan: PlanArgument = None,
    settings: SetOption = None,
    home: Annotated[
        Path, typer.Option(envvar="ATOLL_HOME", help="Where the server keeps its keys, its store and its runs.")
    ] = Path("atoll-server"),
    host: Annotated[str, typer.Option(help="Address that clients reach it at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for clients.")] = 8443,
    admin_port: Annotated[int, typer.Option(help="Port for the operator, on this machine only; 0 for any.")] = 0,
    cert: Annotated[Path | None, typer.Option(help="The server's certificate, e.g. of atoll certs.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Ask clients for certificates too, and trust those of this authority.")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="Begin when so many clients are approved and there; as many as the plan asks unless given."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the run; from the plan unless given.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(help="Start from this model.safetensors; with rounds = 0 it is evaluated at the clients only."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="sqlite:///PATH or postgresql://USER@HOST/NAME; SQLite in the home unless given.")
    ] = None,
    objects: Annotated[
        str | None,
        typer.Option(help="Where models and updates lie: a directory, s3://, gs:// or az://; the home unless given."),
    ] = None,
    max_samples: Annotated[int, typer.Option(help="No client weighs more than one with so many samples.")] = 10_000_000,
    ui_host: Annotated[
        str | None, typer.Option(help="Serve the live page at this address too, for people with links of atoll access.")
    ] = None,
    ui_port: Annotated[int, typer.Option(help="Port of the live page at --ui-host.")] = 8444,
    ui_name: Annotated[
        list[str] | None, typer.Option(help="A name that browsers reach --ui-host by. May be repeated.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all runs are over and clients know it.")] = False,
) -> None:
    """Serve a plan to clients over HTTPS; without one, go on with the runs of the home.

    A server that was stopped or killed goes on where it was when it is started again with the same home.
    """
    if (cert is None) != (key is None):
        raise RunError("--cert and --key belong together: give both, e.g. of atoll certs")
    chosen = _chosen_plan(plan, settings, model)
    with server_packages():
        from atoll.network.server.operations import Operations
        from atoll.network.server.serving import locked
        from atoll.network.server.serving import serve as serve_forever
        from atoll.network.server.store import Store
        from atoll.network.server.web import tls_context
        from atoll.ui.federation import federation_page
        from atoll.ui.serving import page_server

    tls = tls_context(cert, key, client_ca) if cert is not None and key is not None else None
    with locked(home):
        with server_packages():  # drivers are imported when a database is opened
            database = Store(store or f"sqlite:///{home.resolve()}/store.db")
        operations = Operations(home, database, objects=objects, num_clients=clients, max_samples=max_samples)
        if chosen is not None:
            called = name or _name(chosen.name or f"{chosen.data.name}-{chosen.algorithm.name}")
            operations.ensure_run(called, chosen, model)
        page = federation_page(operations, home)
        serve_forever(
            operations,
            home,
            host=host,
            port=port,
            tls=tls,
            admin_port=admin_port,
            once=once,
            page=page,
            more=[] if ui_host is None else [page_server(page, ui_host, ui_port, tls, ui_name or ())],
        )


@contextmanager
def server_packages() -> Iterator[None]:
    """Say how to install what a server needs, where that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "atoll":
            raise
        raise RunError(
            f"a server needs the package {error.name.partition('.')[0]}, which is not installed: "
            "pip install 'atoll[server]'"
        ) from error


def _chosen_plan(plan: str | None, settings: list[str] | None, model: Path | None) -> Plan | None:
    """Read the plan to serve, if one is named; refuse options that would change nothing."""
    if plan is None and settings:
        raise RunError(
            "--set changes a plan, but none is named, and the runs of the home keep theirs: name the plan, "
            "or leave --set out"
        )
    if plan is None and model is not None:
        raise RunError("--model is where a plan's run starts, but no plan is named: name one, or leave --model out")
    chosen = read_plan(plan, read_settings(settings)) if plan is not None else None
    if chosen is not None and model is not None and not chosen.rounds and not chosen.evaluation.clients_every:
        raise RunError(
            "with rounds = 0 the model of --model is evaluated at the clients, but the plan does not ask for that: set "
            "evaluation.clients_every = 1"
        )
    return chosen


def _name(text: str) -> str:
    """Make a run's name from a plan's."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")[:64] or "run"
