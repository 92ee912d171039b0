"""Data sets from tables: targets, owners, groups and test rows by the names of columns. Shapes: N rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from atoll.core.errors import DataError, nearest
from atoll.data.columns import CATEGORY, EMPTY, NUMBER, Column, Table
from atoll.data.encoding import Encoding, Summary, merge, summarise
from atoll.data.targets import BINARY, CLASSIFICATION, MULTI_LABEL, REGRESSION, SURVIVAL, Array

MOST_CLASSES = 20
"""A target of whole numbers with at most so many different values is read as classes, else as a number."""
PURPOSE = 121
MARKS = {"train": 0.0, "test": 1.0}


class TableOptions(TypedDict, total=False):
    """What may be said of a table, see `Dataset.from_csv`."""

    target: str | Sequence[str]
    owner: str | None
    group: str | None
    features: Sequence[str] | None
    categories: Sequence[str]
    problem: str
    encoding: str | Path | Encoding | None
    unknown: Literal["refuse", "ignore"]
    min_count: int
    seed: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Which columns are what."""

    target: str | Sequence[str]
    owner: str | None = None
    group: str | None = None
    features: Sequence[str] | None = None
    problem: str = ""
    min_count: int = 1
    unknown: Literal["refuse", "ignore"] = "refuse"
    encoding: str | Path | Encoding | None = "federated"

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the target columns."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)

    def feature_columns(self, table: Table, marks: str | None = None) -> list[Column]:
        """Return the columns that are features: those named, else all that have no other role."""
        known = self.fixed_encoding()
        roles = {*self.targets, self.owner, self.group, marks}
        others = [name for name in table.names if name not in roles]
        names = self.features if self.features is not None else (known.columns if known else others)
        if not names:
            raise DataError(f"{table.source} has no feature columns beside {', '.join(self.targets)}: add some")
        twice = [name for name in names if name in self.targets]
        if twice:
            raise DataError(f"'{twice[0]}' is the target and cannot be a feature too: leave it out of features")
        return [table.column(name) for name in names]

    def fixed_encoding(self) -> Encoding | None:
        """Return the encoding that was given, as an object or a file; None if it is to be fitted."""
        if isinstance(self.encoding, Encoding) or self.encoding is None or self.encoding == "federated":
            return self.encoding if isinstance(self.encoding, Encoding) else None
        return Encoding.read(self.encoding)


def site_summary(table: Table, roles: Roles) -> Summary:
    """Summarise all rows of one site's table, for an encoding that several sites share."""
    classes = _class_names(_target_columns(table, roles), roles, ())
    return summarise(roles.feature_columns(table), classes=classes or (), min_count=roles.min_count)


def dataset_fields(table: Table, roles: Roles, test: Table | str | float, seed: int) -> dict[str, Any]:
    """Return the fields of a `Dataset` made of a table; `test` is a table, a column that marks rows, or a share."""
    marks = test if isinstance(test, str) else None
    tables = [table, test] if isinstance(test, Table) else [table]
    is_test = np.concatenate([np.full(each.num_rows, place == 1) for place, each in enumerate(tables)])
    if marks is not None:
        is_test = _marked(table.column(marks, "test"))
    elif not isinstance(test, Table):
        is_test = drawn_rows(table.num_rows, float(test), seed)
    _check_split(is_test, table.source)
    features = _joined([roles.feature_columns(each, marks) for each in tables])
    targets = _joined([_target_columns(each, roles) for each in tables])
    fields: dict[str, Any] = {}
    owners = _numbered(tables[:1], roles.owner, "owner", ~is_test[: table.num_rows])
    groups = _numbered(tables, roles.group, "group", None)
    encoding = _encoding(features, roles, ~is_test, owners[0] if owners else None)
    known = encoding.classes if encoding else ()
    y, about = _targets(targets, roles, known, table.source)
    x = encoding.apply(features, table.source) if encoding else _plain(features, table.source)
    names = encoding.feature_names if encoding else tuple(column.name for column in features)
    for part, rows in (("train", ~is_test), ("test", is_test)):
        fields |= {f"{part}_x": x[rows], f"{part}_y": y[rows]}
        if groups:
            fields[f"{part}_groups"] = groups[0][rows]
    if owners:
        fields |= {"owners": owners[0][~is_test[: table.num_rows]], "owner_names": owners[1]}
    if groups:
        fields["group_names"] = groups[1]
    return fields | about | {"feature_names": names, "encoding": encoding}


def drawn_rows(num: int, share: float, seed: int) -> Array:
    """Return which rows are test rows, (N,) booleans: a share of all, at least one, drawn by the seed."""
    if not 0 < share < 1:
        raise DataError(f"test is a share in (0, 1), a file, or a column that marks rows: got {share}")
    if num < 2:
        raise DataError(f"there are {num} samples: at least 2 are needed, one for training and one for test")
    picked = np.zeros(num, dtype=bool)
    size = min(num - 1, max(1, round(share * num)))
    picked[np.random.default_rng([seed, PURPOSE]).permutation(num)[:size]] = True
    return picked


def class_numbers(names: Sequence[str], classes: Sequence[str], what: str) -> Array:
    """Return the number of each name among the classes; DataError if one is not among them."""
    places = {name: place for place, name in enumerate(classes)}
    for row, name in enumerate(names):
        if name not in places:
            raise DataError(f"{what} has the class '{name}' in row {row + 1}: {nearest(name, classes)}")
    return np.array([places[name] for name in names], dtype=np.int64)


def _marked(column: Column) -> Array:
    """Return which rows a column marks for test: 1 or "test"."""
    values = column.values
    if column.kind == CATEGORY:
        values = np.array([MARKS.get(str(text).lower(), np.nan) for text in values])
    wrong = ~np.isin(values.astype(np.float64), (0, 1))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"test column '{column.name}' has {column.values[row]} in row {row + 1}: mark rows with 0 and 1, "
            '"train" and "test", or true and false'
        )
    marked: Array = values == 1
    return marked


def _check_split(is_test: Array, source: str) -> None:
    for part, num in (("training", int((~is_test).sum())), ("test", int(is_test.sum()))):
        if not num:
            raise DataError(f"{source} has no {part} rows: give at least one for training and one for test")


def _joined(tables: list[list[Column]]) -> list[Column]:
    """Return columns with the rows of all tables, those of the first before those of the second."""
    if len(tables) == 1:
        return tables[0]
    joined = []
    for parts in zip(*tables, strict=True):
        kinds = {part.kind for part in parts} - {EMPTY}
        if len(kinds) > 1:
            raise DataError(
                f"column '{parts[0].name}' holds numbers in one file and texts in the other: correct them, or read it "
                f"with categories=['{parts[0].name}']"
            )
        values = [part.texts().values if CATEGORY in kinds else part.values for part in parts]
        joined.append(Column(parts[0].name, np.concatenate(values)))
    return joined


def _numbered(
    tables: list[Table], name: str | None, role: str, rows: Array | None
) -> tuple[Array, tuple[str, ...]] | None:
    """Return a number for each row by its text in a column, and the texts; only those of `rows` get a name."""
    if name is None:
        return None
    [column] = _joined([[table.column(name, role)] for table in tables])
    if column.missing.any():
        row = int(column.missing.argmax())
        raise DataError(
            f"{tables[0].source}: {role} column '{name}' has no value in row {row + 1} "
            f"({int(column.missing.sum())} such): give every row one, or drop these rows"
        )
    named = column if rows is None else column.picked(rows)
    names = named.names()
    places = {text: place for place, text in enumerate(names)}
    return np.array([places.get(text, -1) for text in column.texts().values]), tuple(names)


def _target_columns(table: Table, roles: Roles) -> list[Column]:
    columns = [table.column(name, "target") for name in roles.targets]
    for column in columns:
        if column.missing.any():
            row = int(column.missing.argmax())
            raise DataError(
                f"{table.source}: target '{column.name}' is missing in row {row + 1} ({int(column.missing.sum())} "
                "such): drop these rows, or fill in the target"
            )
    return columns


def _class_names(columns: list[Column], roles: Roles, known: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of the classes of a target; None if it is not one of several classes."""
    if len(columns) > 1 or roles.problem not in ("", CLASSIFICATION, BINARY):
        return None
    [column] = columns
    if known:
        return tuple(known)
    names = column.names()
    whole = column.kind == CATEGORY or bool((column.values == np.floor(column.values)).all())
    return (
        tuple(names) if roles.problem or (whole and (column.kind == CATEGORY or len(names) <= MOST_CLASSES)) else None
    )


def _targets(columns: list[Column], roles: Roles, known: Sequence[str], source: str) -> tuple[Array, dict[str, Any]]:
    """Return targets and what a `Dataset` says of them."""
    classes = _class_names(columns, roles, known)
    if classes is not None:
        y = class_numbers(columns[0].texts().values.tolist(), classes, f"{source}: target '{columns[0].name}'")
        if len(classes) < 2 or (roles.problem == BINARY and len(classes) != 2):
            wanted = "exactly two classes" if roles.problem == BINARY else "at least two classes"
            raise DataError(f"{source}: target '{columns[0].name}' has the classes {', '.join(classes)}: give {wanted}")
        if roles.problem == BINARY:
            return y.astype(np.float32), {"problem": BINARY}
        return y, {"problem": CLASSIFICATION, "num_classes": len(classes), "class_names": classes}
    for column in columns:
        if column.kind != NUMBER:
            raise DataError(
                f"{source}: target '{column.name}' holds texts, but {roles.problem or 'this problem'} needs "
                "numbers; convert it, or name one target for classification"
            )
    y = np.stack([column.values for column in columns], axis=1)
    inferred = MULTI_LABEL if len(columns) > 1 and np.isin(y, (0, 1)).all() else REGRESSION
    problem = roles.problem or inferred
    if problem == SURVIVAL and len(columns) != 2:
        raise DataError(f"survival needs two targets, (time, event), got {', '.join(roles.targets)}: name both columns")
    names = roles.targets if problem == MULTI_LABEL else ()
    return y if len(columns) > 1 else y[:, 0], {"problem": problem, "class_names": names}


def _encoding(features: list[Column], roles: Roles, is_train: Array, owners: Array | None) -> Encoding | None:
    """Return the encoding: as given, or fitted from a summary of each owner's training rows."""
    if roles.encoding is None:
        return None
    fixed = roles.fixed_encoding()
    if fixed is not None:
        return fixed
    rows = np.flatnonzero(is_train)
    sites = [rows] if owners is None else [rows[owners[rows] == owner] for owner in np.unique(owners[rows])]
    summaries = [summarise([c.picked(site) for c in features], min_count=roles.min_count) for site in sites]
    return Encoding.of(merge(summaries), unknown=roles.unknown)


def _plain(features: list[Column], source: str) -> Array:
    """Return columns of numbers as they are."""
    for column in features:
        if column.kind == CATEGORY or column.missing.any():
            what = "texts" if column.kind == CATEGORY else "missing values"
            raise DataError(f"{source}: column '{column.name}' holds {what}: use encoding='federated', or convert it")
    return np.stack([column.values for column in features], axis=1).astype(np.float32)
