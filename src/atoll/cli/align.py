"""`atoll align`: join the records of several tables by private set intersection."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import DataError, PlanError

if TYPE_CHECKING:
    from atoll.alignment.ids import Rule
    from atoll.alignment.records import Rows


def align(
    tables: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="CSV files, one of each party; the first asks the others.")
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
) -> None:
    """Join tables by ids: each party gets the rows that all have, in one order, and learns nothing of other ids."""
    from atoll.alignment.machines import must_be_same
    from atoll.alignment.records import checked_tables, read_rows

    if check:
        found = checked_tables(tables)
        must_be_same(found)
        print(f"{len(found)} tables are as they were aligned, and have the same rows in the same order")
        return
    if len(tables) < 2:
        raise PlanError(f"there is nothing to align with, got {len(tables)} file: name those of two or more parties")
    if not column or len(column) not in (1, len(tables)):
        raise PlanError(
            f"--column is given {len(column or [])} times for {len(tables)} files: give it once, or once for each file"
        )
    read = {path.stem: read_rows(path) for path in tables}
    if len(read) < len(tables):
        raise PlanError("two files have the same name, which names their party: rename one")
    if not count and out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty: choose another directory with --out, or empty it")
    columns = dict(zip(read, column * len(tables) if len(column) == 1 else column, strict=False))
    secret = _secret(secret_file)
    _join(read, columns, "exact" if exact else "folded", out, count=count, secret=secret, workers=workers)


def _secret(path: Path | None) -> bytes:
    try:
        return b"" if path is None else path.read_bytes().strip()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


def _join(
    read: dict[str, Rows],
    columns: dict[str, str],
    rule: Rule,
    out: Path,
    *,
    count: bool,
    secret: bytes,
    workers: int | None,
) -> None:
    """Align tables, write them, and say what was found."""
    from atoll.alignment.local import align as align_ids
    from atoll.alignment.records import write_aligned
    from atoll.alignment.workers import spread_over
    from atoll.engine.base import worker_count

    started, asker = time.perf_counter(), next(iter(read))
    ids = {name: table.ids(columns[name]) for name, table in read.items()}
    with spread_over(worker_count(workers)) as spread:
        found = align_ids(ids, asker, rule=rule, count_only=count, secret=secret, spread=spread)
    seconds = time.perf_counter() - started
    for name, size in found.sizes.items():
        print(f"{name}: {len(ids[name]):,} ids, {size:,} in common with the {len(ids[asker]):,} of {asker}")
    print(f"{found.messages} messages, {found.num_bytes:,} bytes, {seconds:.1f} s")
    if count:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, aligned in found.aligned.items():
        path = write_aligned(read[name], aligned, columns[name], rule, out)
        print(f"{len(aligned.rows):,} rows of {name} in {path}")
    print(f"keep *.alignment.json secret; atoll align --check {out}/*.csv compares rows before training")
