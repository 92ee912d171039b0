"""Tables as named columns of numbers or categories, read from CSV and Parquet files and data frames.

What a model cannot take, such as dates or text among numbers, is refused here, with the column and the row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.core.errors import DataError, close_to, nearest
from atoll.data.targets import Array

NUMBER: Final = "number"
CATEGORY: Final = "category"
EMPTY: Final = "empty"
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""Texts that stand for a missing value, in small letters."""
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ].*)?")
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0*")
TRUTH = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, eq=False)
class Column:
    """One column: float64 numbers with NaN where missing, or an object array of texts with None."""

    name: str
    values: Array

    @property
    def missing(self) -> Array:
        """Where there is no value."""
        if self.values.dtype.kind == "f":
            return np.isnan(self.values)
        return np.array([value is None for value in self.values], dtype=bool)

    @property
    def kind(self) -> str:
        """`number`, `category`, or `empty` if all values are missing."""
        if bool(self.missing.all()):
            return EMPTY
        return NUMBER if self.values.dtype.kind == "f" else CATEGORY

    def picked(self, rows: Array) -> Column:
        """Return some rows of the column."""
        return Column(self.name, self.values[rows])

    def texts(self) -> Column:
        """Return the column as categories; whole numbers are written without a point."""
        if self.values.dtype.kind != "f":
            return self
        texts = [None if np.isnan(value) else number_text(value) for value in self.values]
        return Column(self.name, _objects(texts))

    def names(self) -> list[str]:
        """Return the different values as texts: numbers by size, other texts in alphabetical order."""
        present = self.values[~self.missing]
        return [number_text(value) for value in np.unique(present)] if self.kind == NUMBER else sorted(set(present))


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length by name, parsed when they are asked for; `source` names the table in errors."""

    source: str
    num_rows: int
    parsers: Mapping[str, Callable[[], Column]]

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return list(self.parsers)

    def column(self, name: str, role: str = "feature") -> Column:
        """Parse a column by its name; DataError suggests the nearest name."""
        if name not in self.parsers:
            raise DataError(f"{self.source} has no {role} column '{name}': {nearest(name, self.parsers)}")
        return self.parsers[name]()


def number_text(value: float) -> str:
    """Return a number as the name of a category.

    >>> number_text(3.0), number_text(0.5)
    ('3', '0.5')
    """
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def read_csv(
    path: str | Path, *, columns: Sequence[str] | None = None, delimiter: str = ",", categories: Iterable[str] = ()
) -> Table:
    """Read a CSV file; `columns` names the columns of a file without a header, `categories` those that are codes."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = list(columns) if columns is not None else next(reader, [])
            rows = []
            for row in reader:
                if row and len(row) != len(header):
                    raise DataError(
                        f"{path} line {reader.line_num} has {len(row)} values, but there are {len(header)} columns; "
                        "quote values that hold a delimiter, or choose another one with delimiter="
                    )
                if row:
                    rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as CSV: {why}; check the path, and that it is UTF-8 text") from error
    names = [name.strip() for name in header]
    _check_names(str(path), names)
    if not rows:
        raise DataError(f"{path} has no rows: give a file with a line of column names and at least one row")
    codes = _known(str(path), names, categories)
    texts = zip(names, zip(*rows, strict=True), strict=True)
    parsers = {name: partial(_from_texts, str(path), name, values, name in codes) for name, values in texts}
    return Table(str(path), len(rows), parsers)


def read_parquet(path: str | Path, *, categories: Iterable[str] = ()) -> Table:
    """Read a Parquet file with pyarrow."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: Parquet files need pyarrow: pip install 'atoll[parquet]'") from error
    try:
        table = parquet.ParquetFile(path).read()
    except Exception as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}; check the path and the file") from error
    _check_names(str(path), table.column_names)
    lists = {name: table.column(place).to_pylist() for place, name in enumerate(table.column_names)}
    return table_of(lists, str(path), categories=categories)


def table_of(frame: Any, source: str, *, categories: Iterable[str] = ()) -> Table:
    """Return the columns of a pandas or polars data frame, or of a mapping from names to values."""
    names = [str(name) for name in getattr(frame, "columns", frame)]
    _check_names(source, names)
    codes = _known(source, names, categories)
    keys = list(getattr(frame, "columns", frame))
    parsers = {
        name: partial(_from_values, source, name, frame[key], name in codes)
        for name, key in zip(names, keys, strict=True)
    }
    lengths = {len(frame[key]) for key in keys}
    if lengths == {0}:
        raise DataError(f"{source} has no rows: give at least one")
    if len(lengths) > 1:
        raise DataError(f"{source} has columns of unequal length: {sorted(lengths)}; give every row all values")
    return Table(source, lengths.pop(), parsers)


def _check_names(source: str, names: Sequence[str]) -> None:
    if not names or names == [""]:
        raise DataError(f"{source} is empty: give a file with a line of column names and at least one row")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise DataError(f"{source} has several columns named {', '.join(map(repr, twice))}: rename all but one")
    if "" in names:
        raise DataError(f"{source} has a column without a name, number {list(names).index('') + 1}: name it")


def _known(source: str, names: Sequence[str], wanted: Iterable[str]) -> frozenset[str]:
    for name in wanted:
        if name not in names:
            hint = close_to(name, names) or f"known: {', '.join(names)}"
            raise DataError(f"{source} has no column '{name}', which categories names: {hint}")
    return frozenset(wanted)


def _objects(values: Sequence[Any]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _from_texts(source: str, name: str, texts: Sequence[str], code: bool) -> Column:
    """Return a column of a text file: numbers if all values are, else categories."""
    values = [None if (text := each.strip()).lower() in MISSING else text for each in texts]
    present = [text for text in values if text is not None]
    if not present:
        return Column(name, np.full(len(values), np.nan))
    if code:
        return Column(name, _objects([text and WHOLE.sub(r"\1", text) for text in values]))
    numbers = [_number(text) for text in values]
    texts_at = [row for row, number in enumerate(numbers) if number is None]
    if not texts_at:
        return Column(name, np.array(numbers, dtype=np.float64))
    if {text.lower() for text in present} <= set(TRUTH):
        return Column(name, np.array([np.nan if text is None else TRUTH[text.lower()] for text in values]))
    dates = next((text for text in present if DATE.fullmatch(text)), None)
    if dates is not None:
        raise _dates(source, name, dates)
    if len(texts_at) < len(present):
        raise _mixed(source, name, len(present) - len(texts_at), values[texts_at[0]], texts_at[0])
    return Column(name, _objects(values))


def _number(text: str | None) -> float | None:
    """Return a number, NaN for a missing value, and None for any other text."""
    if text is None:
        return np.nan
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) and "_" not in text else None


def _from_values(source: str, name: str, given: Any, code: bool) -> Column:
    """Return a column of a data frame or a list, whose values have types."""
    column = _typed(source, name, given)
    return column.texts() if code else column


def _typed(source: str, name: str, given: Any) -> Column:
    values = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else _as_array(given))
    if values.ndim != 1:
        raise DataError(f"{source}: column '{name}' has shape {values.shape}: a column has one value a row")
    if values.dtype.kind in "Mm":
        raise _dates(source, name, str(values[0]))
    if values.dtype.kind in "biuf":
        numbers = values.astype(np.float64)
        if bool(np.isinf(numbers).any()):
            raise DataError(
                f"{source}: column '{name}' has Inf in row {int(np.isinf(numbers).argmax()) + 1}; correct it"
            )
        return Column(name, numbers)
    plain = [None if _absent(value) else value for value in values.tolist()]
    present = [value for value in plain if value is not None]
    if not present:
        return Column(name, np.full(len(plain), np.nan))
    for value in present:
        if isinstance(value, date):
            raise _dates(source, name, str(value))
    numeric = [isinstance(value, bool | int | float) for value in present]
    if all(numeric):
        return Column(name, np.array([np.nan if value is None else float(value) for value in plain]))
    row = next(
        row for row, value in enumerate(plain) if value is not None and not isinstance(value, bool | int | float)
    )
    if any(numeric):
        raise _mixed(source, name, sum(numeric), plain[row], row)
    if not isinstance(plain[row], str):
        raise DataError(
            f"{source}: column '{name}' holds {type(plain[row]).__name__} in row {row + 1}: give numbers or texts"
        )
    return Column(name, _objects([None if value is None or not value.strip() else value for value in plain]))


def _as_array(values: Sequence[Any]) -> Array:
    """Return an array that keeps the types of values: NumPy would write numbers beside texts as texts."""
    if isinstance(values, np.ndarray):
        return values
    kinds = {type(value) for value in values}
    return np.array(values) if len(kinds) == 1 and kinds <= {int, float, bool} else _objects(list(values))


def _absent(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def _dates(source: str, name: str, example: str) -> DataError:
    return DataError(
        f"{source}: column '{name}' holds dates such as {example}, which no model takes: turn them into numbers, such "
        "as days since an event, or leave the column out by naming the features"
    )


def _mixed(source: str, name: str, numbers: int, text: Any, row: int) -> DataError:
    return DataError(
        f"{source}: column '{name}' mixes {numbers} numbers with texts such as {str(text)[:40]!r} in row {row + 1}: "
        f"correct them, or read it as codes with categories=['{name}']"
    )
