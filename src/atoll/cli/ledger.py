"""`atoll ledger`: show a run's ledger, and verify offline that it is unchanged and consistent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import PlanError, RunError

if TYPE_CHECKING:
    from atoll.ledger.audit import Findings
    from atoll.ledger.chain import Fault, Head

LEDGER, RECEIPTS = "ledger.jsonl", "receipts.jsonl"
NO_END = 6
"""Exit code of `verify` if all records are valid, but none ends the run."""

ledger_app = typer.Typer(help="The signed record of every commit: check it offline, look at it.", no_args_is_help=True)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, of the server or of a client.")]


@ledger_app.command()
def verify(
    directory: DirArgument,
    key: Annotated[
        str | None, typer.Option(metavar="HEX", help="The server's public key; by default the one the client knows.")
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A head or a copy that was seen before. May be repeated."),
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
    """Check every hash, every signature, and that the records are consistent; name the first bad record.

    Exits with 0 if all records are valid, with 5 if one is not, and with 6 if the end is missing.
    """
    from atoll.ledger.audit import audit
    from atoll.ledger.chain import Fault

    path = _ledger_of(directory)
    seen = [recorded for file in head or [] for recorded in _heads(file)]
    server_key = _pinned(path) if key is None else _key(key)
    verdict = audit(_lines(path), server_key, seen)
    default = path.parent / RECEIPTS
    if not isinstance(verdict, Fault):
        faults = (_receipt_fault(path, file) for file in receipts or ([default] if default.exists() else []))
        verdict = next((fault for fault in faults if fault is not None), verdict)
    if isinstance(verdict, Fault):
        raise RunError(
            f"{path}: record {verdict.number} {verdict.what}; the records before it are valid, ask the server for the "
            "rest"
        )
    _print_findings(verdict, running=running, key_known=server_key is not None)
    if verdict.ended is None and not running:
        typer.echo(
            f"{path}: the end is missing: no record ends the run, so that later ones may have been cut off; pass heads "
            "that others have seen with --head, or --running if the run still goes on",
            err=True,
        )
        raise typer.Exit(NO_END)


def _print_findings(findings: Findings, *, running: bool, key_known: bool) -> None:
    """Print the summary of a valid ledger."""
    from atoll.ledger.words import printable

    print(f"ledger of run {findings.run}: {findings.head.length} records, all as they were written")
    print(
        f"{findings.rounds} rounds, {findings.abandoned} abandoned, {findings.rejected} updates rejected; "
        f"{printable(findings.ended or ('still running' if running else 'the end is missing'))}"
        + ("" if findings.epsilon is None else f"; epsilon {findings.epsilon:.4g} spent")
    )
    for signer in findings.signers:
        print(f"client {signer.client:<5} {signer.id}  {signer.num_updates} updates counted")
    if findings.rounds and not findings.signers:
        print("the cohorts are sealed, because the plan's privacy requires it")
    if not findings.broadcasts:
        print("it does not record what clients were sent: an older server wrote it")
    advice = "" if key_known else "; compare it with the one that you know, or use --key"
    print(f"signed by server {findings.server_key}{advice}")
    print(f"last record {findings.head.hash}")


@ledger_app.command()
def show(directory: DirArgument) -> None:
    """Show one line for each record, without checking it."""
    from atoll.ledger.chain import read
    from atoll.ledger.words import in_words, printable

    for number, line in enumerate(_lines(_ledger_of(directory))):
        try:
            record, _ = read(line)
            print(printable(f"{record.number:>6} {record.kind:9} {in_words(record.kind, record.body)}"))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            print(f"{number:>6} is not a record: run atoll ledger verify")


def _receipt_fault(path: Path, receipts: Path) -> Fault | None:
    """Return the first record that should have counted or rejected an acknowledged update and did not, or None."""
    import msgspec

    from atoll.ledger.chain import Fault, read
    from atoll.ledger.receipts import Receipt, Receipts, max_versions

    file = receipts / RECEIPTS if receipts.is_dir() else receipts
    try:
        acknowledged = [msgspec.json.decode(line, type=Receipt) for line in file.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(
            f"{file} cannot be read as receipts ({error}): name the directory of a run in a client's home"
        ) from error
    records = [read(line)[0] for line in _lines(path)]
    for client in sorted({receipt.client for receipt in acknowledged}):
        pending = Receipts(client, max_versions(records[0].body["plan"], 1 << 20))
        pending.waiting = {receipt.attempt: None for receipt in acknowledged if receipt.client == client}
        for record in records:
            problem = pending.add(record)
            if problem is not None:
                return Fault(record.number, problem)
    return None


def _ledger_of(directory: Path) -> Path:
    path = directory / LEDGER if directory.is_dir() else directory
    if not path.is_file():
        raise RunError(f"there is no {path}: name the directory of a run, of the server or of a client")
    return path


def _lines(path: Path) -> list[str]:
    """Return the lines of a ledger; replace bytes that are not UTF-8, which the verification then reports."""
    text = path.read_bytes().decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else []


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise PlanError(
            f"--key must be 64 hexadecimal digits, got '{text}': every ledger of the server holds it, and /v1/about"
        )
    return key


def _pinned(path: Path) -> bytes | None:
    """Return the key that a client saved when it enrolled, if the ledger is in a client's home, else None."""
    import base64
    import json

    server = path.absolute().parent.parent.parent / "server.json"
    try:
        return base64.b64decode(json.loads(server.read_bytes())["server_key"], validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _heads(path: Path) -> list[Head]:
    """Read heads from a file: lines with a length and a hash, or the records of a copy."""
    import json

    from atoll.ledger.chain import Head, read

    heads: list[Head] = []
    for line in _lines(_ledger_of(path)):
        try:
            fields = json.loads(line)
            if "previous" in fields:
                record, _ = read(line)
                heads.append(Head(record.number + 1, record.hash()))
            else:
                heads.append(Head(int(fields["length"]), str(fields["hash"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f'{path} is neither a copy of a ledger nor a head such as {{"length": 3, "hash": "..."}}: name one of '
                "these"
            ) from error
    return heads
