"""Tables in files that were joined: their rows in the common order, and beside them what commits to it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from atoll.alignment.curve import AlignmentError
from atoll.alignment.files import write_once
from atoll.alignment.ids import RULES, Rule, normalised
from atoll.alignment.machines import Aligned, committed_tag
from atoll.core.errors import DataError, nearest

SUFFIX = ".alignment.json"


class Rows(NamedTuple):
    """A table as its file has it: the first line, and all others."""

    path: Path
    head: list[str]
    rows: list[list[str]]

    def ids(self, column: str) -> list[str]:
        """Return the values of the column that names rows."""
        if column not in self.head:
            raise DataError(f"{self.path} has no column '{column}': {nearest(column, self.head)}")
        place = self.head.index(column)
        return [row[place] for row in self.rows]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies beside an aligned table; the key is for the parties alone."""

    schema: int = 1
    column: str
    rule: str
    rows: int
    key: str
    tag: str


def read_rows(path: Path) -> Rows:
    """Read a CSV file with a header line; DataError says what is wrong with another one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({why}): give a CSV file in UTF-8 with a header line") from error
    for number, row in enumerate(rows):
        if len(row) != len(head):
            raise DataError(f"{path} has {len(row)} values in row {number + 1}, and {len(head)} columns: correct it")
    return Rows(path, head, rows)


def write_aligned(table: Rows, aligned: Aligned, column: str, rule: Rule, directory: Path) -> Path:
    """Write a table's common rows in their order, and its record, which only the owner can read."""
    path, text = directory / table.path.name, io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.head)
    writer.writerows(table.rows[row] for row in aligned.rows)
    write_once(path, text.getvalue().encode())
    record = Record(column=column, rule=rule, rows=len(aligned.rows), key=aligned.key.hex(), tag=aligned.tag.hex())
    write_once(record_path(path), msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", 0o600)
    return path


def record_path(table: Path) -> Path:
    """Return where the record of an aligned table lies."""
    return table.with_name(table.stem + SUFFIX)


def read_record(path: Path) -> Record:
    """Read a record; DataError says what is wrong with another file."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        bytes.fromhex(record.key), bytes.fromhex(record.tag)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"{path} is not what atoll align writes ({error}): align the tables anew") from error
    if record.rule not in RULES:
        raise DataError(f"{path} has the rule '{record.rule}': {nearest(record.rule, RULES)}")
    return record


def commitment_of(record: Record, ids: Sequence[str], what: str) -> bytes:
    """Return the commitment to rows as they are now; refuse rows that are not as they were when they were joined."""
    tag = committed_tag(bytes.fromhex(record.key), [normalised(each, record.rule) for each in ids])  # type: ignore[arg-type]
    if tag.hex() != record.tag:
        raise AlignmentError(
            f"the rows of {what} are not those that were aligned, or are in another order ({len(ids)} rows now, "
            f"{record.rows} then): restore the file, or align the tables anew"
        )
    return tag


def checked_tables(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return the commitment of each aligned table, after a look at its rows."""
    found = {}
    for path in paths:
        record = read_record(record_path(path))
        found[str(path)] = commitment_of(record, read_rows(path).ids(record.column), str(path))
    return found
