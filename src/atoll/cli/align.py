"""`atoll align`: join the records of several tables by private set intersection."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from atoll.core.errors import DataError, PlanError

if TYPE_CHECKING:
    from atoll.alignment.curve import Spread
    from atoll.alignment.exchange import Exchange
    from atoll.alignment.ids import Rule
    from atoll.alignment.machines import Aligned
    from atoll.alignment.records import Rows

SECRET = 16
"""Bytes that a secret has at least where files go through a folder: who reads them can try secrets out."""
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def align(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="CSV files, one of each party, the first of which asks the others; with --through this party's alone.",
        ),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="NAME", help="The column of ids; one for all, or one for each file in order."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the aligned tables.")] = Path("aligned"),
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare ids as they are; else without case and spaces around them.")
    ] = False,
    count: Annotated[bool, typer.Option("--count", help="Learn how many ids are common, and not which.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check aligned tables: each as it was, and all in the same order.")
    ] = False,
    secret_file: Annotated[
        Path | None, typer.Option(help="A file with a secret that the parties agreed on, bound into their keys.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores by default.")] = None,
    through: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Join with parties elsewhere by files in this common folder.")
    ] = None,
    me: Annotated[str | None, typer.Option("--as", metavar="NAME", help="This party's name, with --through.")] = None,
    ask: Annotated[
        list[str] | None, typer.Option("--ask", metavar="NAME", help="A party to ask; may be repeated.")
    ] = None,
    asked_by: Annotated[str | None, typer.Option(metavar="NAME", help="The party that asks this one.")] = None,
    patience: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time to wait for each file, e.g. 90s, 30m, 12h; default 1d.")
    ] = None,
) -> None:
    """Join tables by ids: each party gets the rows that all have, in one order, and learns nothing of other ids."""
    given = {"--through": through, "--as": me, "--ask": ask, "--asked-by": asked_by, "--patience": patience}
    _must_go_together([name for name, value in given.items() if value], check=check)
    if check:
        _check(tables)
        return
    what = _What("exact" if exact else "folded", count, secret_file, workers)
    if through is not None:
        side = _Side(me or "", tuple(ask or ()), asked_by, through, _seconds(patience or "1d"))
        _join_through(side, tables, column or [], out, what)
        return
    if len(tables) < 2:
        raise PlanError(
            f"there is nothing to align with, got {len(tables)} file: name those of two or more parties, or join with "
            "parties elsewhere by --through"
        )
    if not column or len(column) not in (1, len(tables)):
        raise PlanError(
            f"--column is given {len(column or [])} times for {len(tables)} files: give it once, or once for each file"
        )
    _join(tables, column * len(tables) if len(column) == 1 else column, out, what)


class _What(NamedTuple):
    """What is asked for, wherever the parties are."""

    rule: Rule
    count_only: bool
    secret_file: Path | None
    workers: int | None


class _Side(NamedTuple):
    """This party among others elsewhere."""

    me: str
    ask: tuple[str, ...]
    asked_by: str | None
    through: Path
    patience: float


def _must_go_together(given: list[str], *, check: bool) -> None:
    """Refuse options of parties elsewhere that say nothing, or two things at once."""
    if check and given:
        raise PlanError(f"--check looks at tables that are joined, and {given[0]} joins them: leave one of both out")
    if given and "--through" not in given:
        raise PlanError(
            f"{given[0]} is for parties elsewhere: name the folder that you share by --through, or leave {given[0]} out"
        )
    if given and "--as" not in given:
        raise PlanError("--through needs the name of this party, which the others call it by: give --as NAME")
    if given and ("--ask" in given) == ("--asked-by" in given):
        raise PlanError(
            "--through needs either --ask NAME for each party that is asked, at the one that holds the labels, or "
            f"--asked-by NAME at the others, got {'both' if '--ask' in given else 'neither'}: give one of them"
        )


def _check(tables: list[Path]) -> None:
    """Compare aligned tables with what was recorded of them, and with each other."""
    from atoll.alignment.machines import must_be_same
    from atoll.alignment.records import checked_tables

    found = checked_tables(tables)
    must_be_same(found)
    print(f"{len(found)} tables are as they were aligned, and have the same rows in the same order")


def _seconds(text: str) -> float:
    parts = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text)
    if not parts or not float(parts[1]):
        raise PlanError(f"--patience is a number with a unit (s, m, h or d), e.g. 90s, 30m, 12h or 2d, got '{text}'")
    return float(parts[1]) * UNITS[parts[2]]


def _secret(path: Path | None) -> bytes:
    try:
        return b"" if path is None else path.read_bytes().strip()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


def _must_take_tables(out: Path) -> None:
    """Make the directory of aligned tables; DataError if it is not empty, or nothing can be written to it."""
    from atoll.alignment.files import try_writing

    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise DataError(f"{out} is not empty: choose another directory with --out, or empty it")
        try_writing(out)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written to ({error.strerror}): choose another directory with --out"
        ) from error


def _write(table: Rows, name: str, aligned: Aligned, column: str, rule: Rule, out: Path) -> None:
    from atoll.alignment.records import write_aligned

    path = write_aligned(table, aligned, column, rule, out)
    print(f"{len(aligned.rows):,} rows of {name} in {path}")


def _join(tables: list[Path], columns: list[str], out: Path, what: _What) -> None:
    """Align tables of this machine, write them, and say what was found."""
    from atoll.alignment.local import align as align_ids
    from atoll.alignment.records import read_rows
    from atoll.alignment.workers import spread_over
    from atoll.engine.base import worker_count

    read = {path.stem: read_rows(path) for path in tables}
    if len(read) < len(tables):
        raise PlanError("two files have the same name, which names their party: rename one")
    named, secret = dict(zip(read, columns, strict=True)), _secret(what.secret_file)
    ids = {name: table.ids(named[name]) for name, table in read.items()}
    if not what.count_only:
        _must_take_tables(out)
    started, asker = time.perf_counter(), next(iter(read))
    with spread_over(worker_count(what.workers)) as spread:
        found = align_ids(ids, asker, rule=what.rule, count_only=what.count_only, secret=secret, spread=spread)
    seconds = time.perf_counter() - started
    for name, size in found.sizes.items():
        print(f"{name}: {len(ids[name]):,} ids, {size:,} in common with the {len(ids[asker]):,} of {asker}")
    print(f"{found.messages} messages, {found.num_bytes:,} bytes, {seconds:.1f} s")
    if what.count_only:
        return
    for name, aligned in found.aligned.items():
        _write(read[name], name, aligned, named[name], what.rule, out)
    print(f"keep *.alignment.json secret; atoll align --check {out}/*.csv compares rows before training")


def _join_through(side: _Side, tables: list[Path], column: list[str], out: Path, what: _What) -> None:
    """Align the table of this party with those of parties elsewhere, write it, and say what was found."""
    from atoll.alignment.exchange import Exchange, World
    from atoll.alignment.folder import Folder
    from atoll.alignment.ids import read_ids
    from atoll.alignment.records import read_rows
    from atoll.alignment.workers import spread_over
    from atoll.engine.base import worker_count

    if len(tables) != 1 or len(column) != 1:
        raise PlanError(
            f"--through joins the table of this party with those of others, got {len(tables)} files and {len(column)} "
            "times --column: give one file and its --column, or leave --through out to join files of this machine"
        )
    _must_be_apart(side.through, [tables[0], what.secret_file, *([] if what.count_only else [out])])
    world = World(time.monotonic, time.sleep, lambda text: print(text, file=sys.stderr, flush=True))
    others, secret = side.ask or (side.asked_by or "",), _shared_secret(what.secret_file)
    folder = Folder(side.through)
    exchange = Exchange(folder, side.me, others, world, secret=secret, patience=side.patience)
    table = read_rows(tables[0])
    ids = read_ids(table.ids(column[0]), what.rule, str(tables[0]))
    if not what.count_only:
        _must_take_tables(out)  # before anybody waits: keys are lost where nothing can be written
    if not secret:
        print("without --secret-file who can write to the folder can pose as a party", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):  # tell the others, as after Ctrl-C
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    with spread_over(worker_count(what.workers)) as spread:
        aligned = _run(side, ids, exchange, what, secret, spread)
    if aligned is not None:
        _write(table, side.me, aligned, column[0], what.rule, out)
        print(f"keep *.alignment.json secret; atoll align --check {out / tables[0].name} compares rows before training")
    print(f"once all have ended, remove the files in {side.through}: no other session can use them")


def _run(side: _Side, ids: list[str], exchange: Exchange, what: _What, secret: bytes, spread: Spread) -> Aligned | None:
    """Run one side of an alignment and say what it learnt; its common rows, unless their number was wanted."""
    from atoll.alignment.exchange import answer, ask
    from atoll.alignment.machines import Answerer, Asker
    from atoll.alignment.messages import Terms

    terms = Terms(rule=what.rule, count_only=what.count_only)
    if side.asked_by is None:
        asking = ask(Asker(ids=ids, others=side.ask, terms=terms, secret=secret, spread=spread), exchange)
        for name, other in asking.others.items():
            held = other.hello.num_ids if other.hello else 0
            print(f"{name}: {held:,} ids, {other.size:,} in common with the {len(ids):,} of {side.me}")
        return asking.aligned
    answerer = Answerer(ids=ids, asker=side.asked_by, terms=terms, secret=secret, spread=spread)
    answering = answer(answerer, exchange)
    common = "it alone learns how many are common"
    if answering.aligned is not None:
        common = f"{len(answering.aligned.rows):,} of the {len(ids):,} of {side.me} are common to all parties"
    print(f"{side.asked_by}: {answering.num_asked:,} ids, {common}")
    return answering.aligned


def _must_be_apart(through: Path, paths: list[Path | None]) -> None:
    """Refuse files of this party alone in the folder that others read."""
    for path in paths:
        if path is not None and path.resolve().is_relative_to(through.resolve()):
            raise DataError(
                f"{path} lies in {through}, which others read, and is for this party alone: choose another place"
            )


def _shared_secret(path: Path | None) -> bytes:
    secret = _secret(path)
    if path is not None and len(secret) < SECRET:
        raise DataError(
            f"{path} has a secret of {len(secret)} bytes, at least {SECRET} are needed where files go through a "
            "folder: draw one, e.g. by openssl rand -hex 32"
        )
    return secret
