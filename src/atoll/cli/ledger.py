"""`atoll ledger`: read a run's ledger, and find out offline whether it is as it was written and can be true."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.errors import PlanError, RunError

if TYPE_CHECKING:
    from atoll.ledger.chain import Fault, Head

LEDGER, RECEIPTS = "ledger.jsonl", "receipts.jsonl"
NO_END = 6
"""The exit code of `verify` where all records hold, but none says that the run is over."""

ledger_app = typer.Typer(help="The signed record of every commit: check it offline, look at it.", no_args_is_help=True)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, of the server or of a client.")]


@ledger_app.command()
def verify(
    directory: DirArgument,
    key: Annotated[
        str | None, typer.Option(metavar="HEX", help="The server's public key; what the client knows unless given.")
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="What somebody saw before: a head, or another copy. May be repeated."),
    ] = None,
    receipts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A client's run, whose acknowledged updates must be in the ledger. May be repeated."
        ),
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="The run goes on: do not ask for a record of its end.")
    ] = False,
) -> None:
    """Check every hash and signature, and that the story can be true; the first bad record is named.

    Exits with 0 if all is well, with 5 if a record is not, and with 6 if the end is missing.
    """
    from atoll.ledger.audit import audit
    from atoll.ledger.chain import Fault

    path = _ledger_of(directory)
    seen = [each for file in head or [] for each in _heads(file)]
    server_key = _pinned(path) if key is None else _key(key)
    found = audit(_lines(path), server_key, seen)
    kept = receipts or [each for each in [path.parent / RECEIPTS] if each.exists()]
    if not isinstance(found, Fault):
        found = next((fault for each in kept if (fault := _unkept(path, each)) is not None), found)
    if isinstance(found, Fault):
        raise RunError(
            f"{path}: record {found.number} {found.what}; what comes before it holds, ask the server for the rest"
        )
    print(f"ledger of run {found.run}: {found.head.length} records, all as they were written")
    print(
        f"{found.rounds} rounds, {found.abandoned} abandoned, {found.rejected} updates rejected; "
        f"{_printable(found.ended or ('still running' if running else 'the end is missing'))}"
        + ("" if found.epsilon is None else f"; epsilon {found.epsilon:.4g} spent")
    )
    for signer in found.signers:
        print(f"client {signer.client:<5} {signer.id}  {signer.num_updates} updates counted")
    if found.rounds and not found.signers:
        print("who took part is sealed, as the plan's privacy asks for")
    if not found.broadcasts:
        print("it does not say what clients were sent: it is of an older server")
    unsure = "" if server_key else "; compare it with the one that you know, or use --key"
    print(f"signed by server {found.server_key}{unsure}")
    print(f"last record {found.head.hash}")
    if found.ended is None and not running:
        typer.echo(
            f"{path}: the end is missing: no record says that the run is over, so that later ones may have been cut "
            "off; give what others have seen by --head, or say --running if it still is",
            err=True,
        )
        raise typer.Exit(NO_END)


@ledger_app.command()
def show(directory: DirArgument) -> None:
    """Show one line for each record; nothing is checked."""
    from atoll.ledger.chain import read

    for place, line in enumerate(_lines(_ledger_of(directory))):
        try:
            record, _ = read(line)
            print(_printable(f"{record.number:>6} {record.kind:9} {_said(record.kind, record.body)}"))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            print(f"{place:>6} is no record: atoll ledger verify says more")


def _said(kind: str, body: Mapping[str, Any]) -> str:
    """A record's body in a few words."""
    if kind == "start":
        return f"run {body['run']}, plan {body['plan_hash'][:12]}, model {body['model'][:12]}"
    if kind == "commit":
        when = datetime.datetime.fromtimestamp(body["seconds"], datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        clients = ",".join(str(each["client"]) for each in body["cohort"])
        spent = "" if body.get("epsilon") is None else f", epsilon {body['epsilon']:.4g}"
        rejected = f", {len(body['rejected'])} rejected" if body["rejected"] else ""
        return f"{when} version {body['version']} of clients {clients}, model {body['model'][:12]}{spent}{rejected}"
    if kind == "broadcast":
        return f"version {body['version']} was sent as {body['object'][:12]}"
    if kind == "abandon":
        return f"attempt {body['attempt']}: {body['why']}"
    return f"{body['reason']}: version {body['version']}, model {body['model'][:12]}"


def _printable(text: str) -> str:
    """What a server wrote, without anything that would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _unkept(path: Path, receipts: Path) -> Fault | None:
    """Say which record does not do what the server has acknowledged to a client; None if all do."""
    import msgspec

    from atoll.ledger.chain import Fault, read
    from atoll.ledger.receipts import Receipt, Receipts, max_versions

    file = receipts / RECEIPTS if receipts.is_dir() else receipts
    try:
        acknowledged = [msgspec.json.decode(line, type=Receipt) for line in file.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{file} cannot be read as receipts ({error}): name a run's directory of a client") from error
    records = [read(line)[0] for line in _lines(path)]
    for client in sorted({receipt.client for receipt in acknowledged}):
        keeper = Receipts(client, max_versions(records[0].body["plan"], 1 << 20))
        keeper.waiting = {each.attempt: None for each in acknowledged if each.client == client}
        for record in records:
            wrong = keeper.hear(record)
            if wrong is not None:
                return Fault(record.number, wrong)
    return None


def _ledger_of(directory: Path) -> Path:
    path = directory / LEDGER if directory.is_dir() else directory
    if not path.is_file():
        raise RunError(f"there is no {path}: name the directory of a run, of the server or of a client")
    return path


def _lines(path: Path) -> list[str]:
    """The lines of a ledger; bytes that are no text are left to be found as a change."""
    text = path.read_bytes().decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else []


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise PlanError(
            f"--key wants 64 hexadecimal digits, got '{text}': it is in every ledger of the server, and at /v1/about"
        )
    return key


def _pinned(path: Path) -> bytes | None:
    """The key that a client noted when it enrolled, where the ledger is in a client's home."""
    import base64
    import json

    server = path.absolute().parent.parent.parent / "server.json"
    try:
        return base64.b64decode(json.loads(server.read_bytes())["server_key"], validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _heads(path: Path) -> list[Head]:
    """What a file says that somebody saw: lines with a length and a hash, or the records of a copy."""
    import json

    from atoll.ledger.chain import Head, read

    heads: list[Head] = []
    for line in _lines(_ledger_of(path)):
        try:
            found = json.loads(line)
            if "previous" in found:
                record, _ = read(line)
                heads.append(Head(record.number + 1, record.hash()))
            else:
                heads.append(Head(int(found["length"]), str(found["hash"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f'{path} is neither a copy of a ledger nor a head such as {{"length": 3, "hash": "..."}}'
            ) from error
    return heads
