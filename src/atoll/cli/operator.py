"""The commands of an operator: `atoll status`, `clients`, `runs`, `stop`, `certs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings
from atoll.core.errors import RunError

if TYPE_CHECKING:
    from atoll.network.protocol.endpoints import Body, Endpoint, Reply
    from atoll.network.protocol.operator import Address

STOP_SECONDS = 120.0
"""Seconds that `atoll stop` waits for a server to end, which finishes a commit first."""


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"


HomeOption = Annotated[Path, typer.Option(envvar="ATOLL_HOME", metavar="DIR", help="The server's home.")]
AdminOption = Annotated[
    str | None, typer.Option(metavar="URL", help="The operator's address; that of the home unless given.")
]
TokenOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The operator's token; that of the home unless given.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="For people, or for programs.")]
NamesArgument = Annotated[list[str], typer.Argument(metavar="CLIENT...", help="Names or ids of clients.")]

HOME = Path("atoll-server")
TABLE = Format.TABLE

clients_app = typer.Typer(help="Who is part of the federation: list, let in, shut out.", no_args_is_help=True)
runs_app = typer.Typer(help="The runs of a server: list, begin, end.", no_args_is_help=True)


def status(
    home: HomeOption = HOME, admin: AdminOption = None, token_file: TokenOption = None, format: FormatOption = TABLE
) -> None:
    """Show how a server, its runs and its clients are."""
    from atoll.network.protocol import operator_endpoints as endpoints

    answer = _ask(_address(home, admin, token_file), endpoints.STATUS)
    if format is Format.JSON:
        print(json.dumps(answer))
        return
    from atoll.report.reading import human_seconds

    server, clients = answer["server"], answer["clients"]
    print(f"server   up {human_seconds(server['seconds_up'])}, key {server['key']}")
    if server["read_only"]:
        print(f"         READ-ONLY: {server['why']}")
    counts = ", ".join(f"{clients[what]} {what}" for what in ("online", "pending", "revoked", "quarantined"))
    print(f"clients  {clients['approved']} approved: {counts}")
    if answer["runs"]:
        print("\n" + _runs_table(answer["runs"]))
    for run in answer["runs"]:
        if run["sites"] is not None:
            print(f"\n{run['run']}, measured at the clients after round {run['sites']['round']}")
            print(_sites_table(run["sites"]))


@clients_app.command("list")
def clients_list(
    home: HomeOption = HOME, admin: AdminOption = None, token_file: TokenOption = None, format: FormatOption = TABLE
) -> None:
    """Show every client that enrolled."""
    from atoll.network.protocol import operator_endpoints as endpoints

    rows = _ask(_address(home, admin, token_file), endpoints.CLIENTS)["clients"]
    if format is Format.JSON:
        print(json.dumps(rows))
        return
    from atoll.report.reading import human_seconds

    def last_heard(row: Mapping[str, Any]) -> str | None:
        if row["online"] or row["seconds_since"] is None:
            return "now" if row["online"] else None
        return f"{human_seconds(row['seconds_since'])} ago"

    shown = [{**row, "heard": last_heard(row), "ready": _readiness(row["ready"])} for row in rows]
    checked = ("ready",) if any(row["ready"] for row in rows) else ()
    print(_table(shown, ("name", "number", "status", "samples", "agreed", "offences", "heard", "id", *checked)))


@clients_app.command("approve")
def clients_approve(
    names: NamesArgument,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="How many samples each has, as you know: none ever counts as more. See the docs."),
    ] = None,
    home: HomeOption = HOME,
    admin: AdminOption = None,
    token_file: TokenOption = None,
    format: FormatOption = TABLE,
) -> None:
    """Let clients in, after their keys' ids were compared; they are numbered in this order."""
    from atoll.network.protocol import operator_endpoints as endpoints

    approval = endpoints.Approval(names=names, samples=samples)
    numbers = _ask(_address(home, admin, token_file), endpoints.APPROVE, approval)["numbers"]
    by_name = dict(zip(names, numbers, strict=True))
    print(json.dumps(by_name) if format is Format.JSON else "\n".join(f"{n} is client {i}" for n, i in by_name.items()))


@clients_app.command("revoke")
def clients_revoke(
    names: NamesArgument, home: HomeOption = HOME, admin: AdminOption = None, token_file: TokenOption = None
) -> None:
    """Shut clients out, at once."""
    from atoll.network.protocol import operator_endpoints as endpoints

    _ask(_address(home, admin, token_file), endpoints.REVOKE, endpoints.Names(names=names))


@clients_app.command("token")
def clients_token(
    hours: Annotated[float, typer.Option(help="How long it can be used.")] = 24.0,
    home: HomeOption = HOME,
    admin: AdminOption = None,
    token_file: TokenOption = None,
    format: FormatOption = TABLE,
) -> None:
    """Print a token with which one client can enrol, once; give it to that client alone."""
    from atoll.network.protocol import operator_endpoints as endpoints

    lifetime = endpoints.TokenLifetime(seconds=hours * 3600)
    answer = _ask(_address(home, admin, token_file), endpoints.TOKEN, lifetime)
    print(json.dumps(answer) if format is Format.JSON else answer["token"])


@runs_app.command("list")
def runs_list(
    home: HomeOption = HOME, admin: AdminOption = None, token_file: TokenOption = None, format: FormatOption = TABLE
) -> None:
    """Show every run and how far it is."""
    from atoll.network.protocol import operator_endpoints as endpoints

    rows = _ask(_address(home, admin, token_file), endpoints.STATUS)["runs"]
    print(json.dumps(rows) if format is Format.JSON else _runs_table(rows))


@runs_app.command("add")
def runs_add(
    plan: PlanArgument,
    name: Annotated[str, typer.Option(metavar="RUN", help="What to call it: a-z, 0-9 and -.")],
    settings: SetOption = None,
    home: HomeOption = HOME,
    admin: AdminOption = None,
    token_file: TokenOption = None,
) -> None:
    """Begin another run beside those that there are; its parts must be in the catalogue."""
    from atoll.network.protocol import operator_endpoints as endpoints

    address = _address(home, admin, token_file)
    chosen = read_plan(plan, read_settings(settings))
    _ask(address, endpoints.ADD_RUN, endpoints.NewRun(run=name, plan=chosen.to_dict()))


@runs_app.command("stop")
def runs_stop(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    home: HomeOption = HOME,
    admin: AdminOption = None,
    token_file: TokenOption = None,
) -> None:
    """End a run with the model that it has; it cannot go on."""
    from atoll.network.protocol import operator_endpoints as endpoints

    _ask(_address(home, admin, token_file), endpoints.STOP_RUN, endpoints.RunName(run=run))


def stop(home: HomeOption = HOME, admin: AdminOption = None, token_file: TokenOption = None) -> None:
    """Stop the server, politely, and wait until it is gone; started again, it goes on where it was."""
    import time

    from atoll.network.protocol import operator_endpoints as endpoints
    from atoll.network.protocol.operator import is_answering

    address = _address(home, admin, token_file)
    _ask(address, endpoints.STOP)
    until = time.monotonic() + STOP_SECONDS
    while is_answering(address):
        if time.monotonic() > until:
            raise RunError(f"the server is still there after {STOP_SECONDS:g} seconds: see its log")
        time.sleep(0.1)


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    host: Annotated[list[str], typer.Option(help="A name or address of the server. May be repeated.")],
    client: Annotated[
        list[str] | None, typer.Option(help="A client that needs a certificate too. May be repeated.")
    ] = None,
) -> None:
    """Make an authority and certificates, for a year. An organisation may use its own instead."""
    import datetime

    from atoll.network.server.certs import make_certificates

    for path in make_certificates(directory, host, datetime.datetime.now(datetime.UTC), client or ()):
        print(path)


def _address(home: Path, admin: str | None, token_file: Path | None) -> Address:
    """Return the operator's address: as given, and that of the home for the rest."""
    from atoll.network.protocol.operator import TOKEN, Address, address_of, read_token

    if admin is None and token_file is None:
        return address_of(home)
    return Address(admin or address_of(home).url, read_token(token_file or home / TOKEN))


def _ask(address: Address, endpoint: Endpoint[Body, Reply], body: Body | None = None) -> Reply:
    from atoll.network.protocol.operator import ask

    return ask(address, endpoint, body)


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    from atoll.report.reading import human_seconds

    rows = [
        {
            **run,
            "round": f"{run['round']} of {run['rounds']}",
            "answers": f"{run['arrived']} of {run['asked']}",
            "test": _figure(run.get("test") or {}),
            "epsilon": None if run["epsilon"] is None else f"{run['epsilon']:.4g}",
            "waiting": human_seconds(run["seconds_waiting"]),
        }
        for run in runs
    ]
    return _table(rows, ("run", "status", "round", "attempt", "phase", "answers", "waiting", "test", "epsilon"))


def _figure(figures: Mapping[str, float | None]) -> str | None:
    """Return the main figure on the test set as text; None if there is none."""
    from atoll.report.main_figure import main_of, shown, title_of

    value = figures.get(main := main_of(figures))
    return None if value is None else f"{title_of(main)} {shown(main, value)}"


def _readiness(checked: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return for which runs a client is ready by its preflight, and why it is not for others."""
    said = [f"{run}: {'yes' if each['ready'] else each['reason']}" for run, each in sorted(checked.items())]
    return "; ".join(said) or None


def _sites_table(sites: Mapping[str, Any]) -> str:
    """Return the figures of each site, of those in a secret sum, and of all pooled; the worst site is marked."""
    from atoll.report.reading import secret_note, site_rows

    worst, known = sites.get("worst", {}).get("client"), site_rows(sites)
    rows = [
        {
            "site": site["name"] + " (worst)" * (worst is not None and site["client"] == worst),
            "samples": site.get("samples"),
            "told": (site.get("rejected") and f"rejected: {site['rejected']}") or site.get("reason") or "yes",
            **site.get("figures", {}),
        }
        for site in known
    ]
    figures = list(sites.get("pooled", {}))
    if figures:
        total = sum(site.get("samples") or 0 for site in known)
        rows.append({"site": "all pooled", "samples": total, "told": None, **sites["pooled"]})
    shown = [{**row, **{n: None if row.get(n) is None else f"{row[n]:.4g}" for n in figures}} for row in rows]
    return f"{_table(shown, ('site', 'samples', *figures, 'told'))}\n{secret_note(sites)}".rstrip()


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Format rows as a table with a header."""
    cells = [list(columns)]
    cells += [["-" if row[key] is None else str(row[key]) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
