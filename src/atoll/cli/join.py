"""The commands of a client: `atoll enrol` and `atoll join`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.errors import PlanError, RunError

if TYPE_CHECKING:
    from atoll.network.client.app import ClientApp
    from atoll.network.protocol.agreement import Floors

HomeOption = Annotated[Path, typer.Option(metavar="DIR", help="The client's own directory: its key and its memory.")]
CertOption = Annotated[Path | None, typer.Option(help="A certificate of this client, where the server asks for one.")]
KeyOption = Annotated[Path | None, typer.Option(help="The key of --cert.")]


def enrol(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, e.g. https://atoll.example:8443.")],
    token: Annotated[str, typer.Option(help="The one-time token that the operator gave you.")],
    name: Annotated[str, typer.Option(help="What this client is to be called.")],
    home: HomeOption = Path("atoll-client"),
    ca: Annotated[
        Path | None, typer.Option(help="Certificates that vouch for the server; the system's unless given.")
    ] = None,
    cert: CertOption = None,
    key: KeyOption = None,
) -> None:
    """Make a key and become known to a server; its operator must approve before work begins."""
    from atoll.network.client.connection import Connection, tls_context
    from atoll.network.client.home import EnrolledServer, Home

    client_home = Home.make(home)
    try:
        tls = tls_context(ca, cert, key)
        with Connection(url, client_home.key, tls, keep_trying=False) as connection:
            about = connection.about()
            client = connection.enrol(token, name)
        authority = None if ca is None else str(ca.resolve())
        server = EnrolledServer(url=url, server_key=about.server_key, client=client, name=name, authority=authority)
        client_home.enrolled(server)
    finally:
        client_home.close()
    print(f"enrolled as {name}, client {client}; the server's key is {about.server_key.hex()}")
    print("compare that key with the operator's, and ask them to approve this client; then run")
    print(f"\n    atoll join --home {home} --app MODULE:FUNCTION\n")


def join(  # long, since each option of the command is a parameter
    app: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Your function that returns an atoll.ClientApp.")],
    home: HomeOption = Path("atoll-client"),
    floors: Annotated[
        Path | None, typer.Option(help="What you insist on, as TOML; the app's floors unless given.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Keys of all clients as JSON, number to key in hexadecimal; the server's word unless given."),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Take part in these runs only; the first that there is unless given."),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Take part in every run that the floors allow.")] = False,
    budget: Annotated[
        Path | None, typer.Option(help="File of what was spent of max_epsilon, to be shared by homes; the home's own.")
    ] = None,
    base: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR", help="Your directory of a base model, by the name that plans use; repeatable."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to train: cpu, cuda, cuda:1, mps or auto; what the app says unless given."),
    ] = None,
    cert: CertOption = None,
    key: KeyOption = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Try the app against the runs' plans and tell the operator; train for nobody."),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep models received and updates sent here, for atoll redteam on them."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all runs are over.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; problems only.")] = False,
) -> None:
    """Work for the server that this client is enrolled with. Ctrl-C stops and keeps everything."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is like Ctrl-C
    from atoll.network.client.client import Client, OwnerOutput
    from atoll.network.client.connection import Connection, tls_context
    from atoll.network.client.consent import asked_for, every_run
    from atoll.network.client.home import Home
    from atoll.network.client.record import recorder

    if runs is not None and all_runs:
        raise PlanError("--runs and --all-runs contradict each other: leave one out")
    names = [name.strip() for name in (runs or "").split(",") if name.strip()]
    consent = every_run if all_runs else asked_for(names, _ask if sys.stdin.isatty() else None)
    client_home = Home.open(home, budget)
    try:
        server, asked = client_home.server(), _floors(floors)
        tls = tls_context(Path(server.authority) if server.authority else None, cert, key)
        if check:
            from atoll.network.client.preflight import preflight

            with Connection(server.url, client_home.key, tls, server_key=server.server_key, keep_trying=False) as link:
                ready = preflight(
                    lambda: _app(app, base or [], device),
                    client_home,
                    link,
                    asked,
                    names,
                    _say,
                    keys_known=peers is not None,
                )
            raise typer.Exit(0 if ready else RunError.exit_code)
        own = _app(app, base or [], device)
        output = OwnerOutput((lambda text: None) if quiet else _say, _warn)
        with Connection(server.url, client_home.key, tls, server_key=server.server_key, say=_warn) as connection:
            keep = None if record is None else recorder(record, _warn)
            client = Client(own, client_home, connection, output, asked, _peers(peers), consent=consent, record=keep)
            client.run(once=once)
    except KeyboardInterrupt:
        print("stopped; everything is kept: the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        client_home.close()


def _ask(question: str) -> bool:
    """Ask the owner at the terminal."""
    return typer.confirm(_printable(question), default=False)


def _say(text: str) -> None:
    print(_printable(text), flush=True)


def _warn(text: str) -> None:
    print(_printable(text), file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Return a text of a server as one line without control characters, which a terminal would obey.

    >>> _printable("round 1:\\x1b[2J 5 kB\\n")
    'round 1: [2J 5 kB '
    """
    line = text[:1000]
    return line if line.isprintable() else "".join(letter if letter.isprintable() else " " for letter in line)


def _app(path: str, bases: list[str], device: str | None) -> ClientApp:
    """Call the owner's function, and add bases and the device that the command names to those of the app."""
    from dataclasses import replace

    from atoll.core.parts import imported
    from atoll.network.client.app import ClientApp

    if ":" not in path:
        raise PlanError(f"--app names a function, e.g. hospital.app:client, got {path!r}")
    made: Any = imported(path)()
    if not isinstance(made, ClientApp):
        raise PlanError(f"{path} gave {type(made).__name__}: it must return an atoll.ClientApp")
    unnamed = [each for each in bases if not all(each.partition("=")[::2])]
    if unnamed:
        raise PlanError(f"--base is a name and a directory, e.g. stories15m=models/stories15m, got {unnamed[0]!r}")
    own = made if device is None else replace(made, device=device)
    return replace(own, bases={**own.bases, **dict(each.split("=", 1) for each in bases)}) if bases else own


def _floors(path: Path | None) -> Floors | None:
    import tomllib

    from atoll.network.protocol.agreement import Floors

    if path is None:
        return None
    try:
        return Floors.read(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path} cannot be read as floors ({error}): write TOML, e.g. min_cohort = 3") from error


def _peers(path: Path | None) -> dict[int, bytes] | None:
    import json

    if path is None:
        return None
    try:
        keys = {int(number): bytes.fromhex(key) for number, key in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f'{path} cannot be read as keys ({error}): write JSON, e.g. {{"0": "64 digits"}}') from error
    if not all(len(key) == 32 for key in keys.values()):
        raise RunError(f"{path}: a key has 64 hexadecimal digits")
    return keys
