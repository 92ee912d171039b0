"""Encoding of a table's columns as features, fitted from summaries: no site sees another's rows.

Each site summarises its own training rows, the summaries are merged (`merge` is associative, and an empty summary is
its neutral element), and one encoding is made of the whole: numbers are standardised as (x - mean) / std and missing
ones become the mean, categories become one feature each, as zeros and ones.

>>> sites = [Column("age", np.array([40.0, 60.0])), Column("age", np.array([80.0, np.nan]))]
>>> encoding = Encoding.of(merge([summarise([site]) for site in sites]))
>>> encoding.apply([sites[0]]).round(3)
array([[-1.225],
       [ 0.   ]], dtype=float32)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from atoll.core.errors import DataError, nearest
from atoll.data.columns import CATEGORY, EMPTY, NUMBER, Column
from atoll.data.targets import Array

T = TypeVar("T")
SCHEMA = 1
MOST_TEXTS = 1000
"""More different texts than this name single rows rather than groups of them."""
OTHER, ABSENT = "(other)", "(missing)"


class ColumnSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site tells of a column: sums over its rows, no row."""

    kind: Literal["number", "category", "empty"]
    count: int = 0
    """Rows with a value."""
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean: unlike a sum of squares, exact also far from zero."""
    minimum: float | None = None
    maximum: float | None = None
    """Extremes are values of single rows, and left out where small counts are."""
    categories: dict[str, int] = {}
    """Rows of each category."""
    rare: int = 0
    """Rows of categories that too few rows have, which are not named."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one site, or several together, tell of their columns and of their classes."""

    schema: int = SCHEMA
    rows: int = 0
    columns: dict[str, ColumnSummary] = {}
    classes: tuple[str, ...] = ()
    """Names of the classes of the target; empty where it is a number."""

    def to_json(self) -> str:
        """Return the summary as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the summary") -> Summary:
        """Read a summary; DataError says what is wrong with another text."""
        summary = _decoded(text, cls, source)
        for name, each in summary.columns.items():
            numbers = (each.count, each.missing, each.squares, each.rare, *each.categories.values())
            if min(numbers) < 0:
                raise DataError(f"{source}: column '{name}' has a negative count; make the summary anew")
        return summary


def summarise(columns: Iterable[Column], *, classes: Sequence[str] = (), min_count: int = 1) -> Summary:
    """Summarise columns of a site.

    A category of fewer than `min_count` rows is counted but not named, so that it does not betray a person; smallest
    and largest values are then left out too.
    """
    columns = list(columns)
    summaries = {column.name: _summary_of(column, min_count) for column in columns}
    return Summary(rows=len(columns[0].values) if columns else 0, columns=summaries, classes=tuple(classes))


def merge(summaries: Iterable[Summary]) -> Summary:
    """Return the summary of the rows of all sites together."""
    return reduce(_merged, summaries, Summary())


class Feature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one column becomes one or several features."""

    name: str
    kind: Literal["number", "category"]
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()
    other: bool = False
    """Whether one feature stands for all categories that are not named."""
    missing: bool = False
    """Whether one feature stands for a missing category."""

    @property
    def names(self) -> list[str]:
        """The names of the features that the column becomes."""
        if self.kind == NUMBER:
            return [self.name]
        extra = [OTHER] * self.other + [ABSENT] * self.missing
        return [f"{self.name}={category}" for category in (*self.categories, *extra)]


class Encoding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a table becomes features: the same at every site."""

    schema: int = SCHEMA
    features: tuple[Feature, ...]
    classes: tuple[str, ...] = ()
    unknown: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a category that no summary named: an error, or zeros."""

    @classmethod
    def of(
        cls, summary: Summary, *, max_categories: int = 50, unknown: Literal["refuse", "ignore"] = "refuse"
    ) -> Encoding:
        """Make an encoding of what all sites told: the most frequent categories of a column get features."""
        features = tuple(_feature(name, each, max_categories) for name, each in summary.columns.items())
        return cls(features=features, classes=summary.classes, unknown=unknown)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of all features, in order."""
        return tuple(name for feature in self.features for name in feature.names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that it takes."""
        return tuple(feature.name for feature in self.features)

    @property
    def categories(self) -> tuple[str, ...]:
        """The names of the columns that are categories, also where they look like numbers."""
        return tuple(feature.name for feature in self.features if feature.kind == CATEGORY)

    def apply(self, columns: Iterable[Column], source: str = "the table") -> Array:
        """Return columns as a float32 matrix of rows and features."""
        by_name = {column.name: column for column in columns}
        absent = [name for name in self.columns if name not in by_name]
        if absent:
            raise DataError(
                f"{source} has no column '{absent[0]}', which the encoding needs: add it, or encode without"
            )
        parts = [self._encoded(feature, by_name[feature.name], source) for feature in self.features]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _encoded(self, feature: Feature, column: Column, source: str) -> Array:
        if feature.kind == NUMBER:
            if column.kind == CATEGORY:
                raise DataError(
                    f"{source}: column '{feature.name}' holds texts, but the encoding takes numbers; convert it"
                )
            numbers = np.where(column.missing, feature.mean, column.values.astype(np.float64))
            scaled: Array = ((numbers - feature.mean) / feature.std)[:, None]
            return scaled
        texts = column.texts().values
        places = {category: place for place, category in enumerate(feature.categories)}
        width = len(feature.names)
        if feature.missing:
            places[ABSENT] = width - 1
        other = len(feature.categories) if feature.other else -1
        found = np.array([places.get(ABSENT if text is None else text, other) for text in texts])
        unknown = (found < 0) & (self.unknown == "refuse")
        if unknown.any():
            row = int(unknown.argmax())
            what = "is missing" if texts[row] is None else f"is {texts[row]!r}, which no site told of"
            raise DataError(
                f"{source}: category '{feature.name}' {what} in row {row + 1} ({int(unknown.sum())} such): "
                f"{nearest(texts[row] or '', feature.categories)}; correct it, fit the encoding on such rows too, or "
                "use unknown='ignore'"
            )
        matrix = np.zeros((len(texts), width))
        matrix[found >= 0, found[found >= 0]] = 1
        return matrix

    def to_json(self) -> str:
        """Return the encoding as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the encoding") -> Encoding:
        """Read an encoding; DataError says what is wrong with another text."""
        encoding = _decoded(text, cls, source)
        for feature in encoding.features:
            if not feature.std > 0:
                raise DataError(f"{source}: '{feature.name}' has the scale {feature.std}: it must be above 0")
        return encoding

    @classmethod
    def read(cls, path: str | Path) -> Encoding:
        """Read an encoding from a file."""
        return cls.from_json(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Return the text of a file; DataError if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; check the path"
        ) from error


def _decoded(text: str | bytes, kind: type[T], source: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{source} is not what `atoll data` writes: {error}; make it anew") from error


def _summary_of(column: Column, min_count: int) -> ColumnSummary:
    present, missing = column.values[~column.missing], int(column.missing.sum())
    if column.kind == EMPTY:
        return ColumnSummary(kind=EMPTY, missing=missing)
    if column.kind == NUMBER:
        mean, open_ = float(present.mean()), min_count <= 1
        return ColumnSummary(
            kind=NUMBER,
            count=len(present),
            missing=missing,
            mean=mean,
            squares=float(((present - mean) ** 2).sum()),
            minimum=float(present.min()) if open_ else None,
            maximum=float(present.max()) if open_ else None,
        )
    counts = Counter(present.tolist())
    if len(counts) > MOST_TEXTS:
        raise DataError(
            f"column '{column.name}' has {len(counts)} different texts in {len(present)} rows: at most {MOST_TEXTS} "
            "are categories; leave it out by naming the features, or group them"
        )
    named = {text: counts[text] for text in sorted(counts) if counts[text] >= min_count}
    rare = len(present) - sum(named.values())
    return ColumnSummary(kind=CATEGORY, count=len(present), missing=missing, categories=named, rare=rare)


def _merged(one: Summary, other: Summary) -> Summary:
    for each in (one, other):
        if each.schema != SCHEMA:
            raise DataError(f"a summary has schema {each.schema}, this release reads {SCHEMA}: make it anew, or update")
    if not one.columns or not other.columns:
        return one if one.columns else other
    differing = sorted(set(one.columns) ^ set(other.columns))
    if differing:
        raise DataError(f"not all sites summarised the column '{differing[0]}': name the same features at all sites")
    if bool(one.classes) != bool(other.classes):
        raise DataError("the target is classes at one site and a number at another: say problem= at all sites")
    columns = {name: _both(name, each, other.columns[name]) for name, each in one.columns.items()}
    classes = _by_size(set(one.classes) | set(other.classes))
    return Summary(rows=one.rows + other.rows, columns=columns, classes=classes)


def _both(name: str, one: ColumnSummary, other: ColumnSummary) -> ColumnSummary:
    """Merge two summaries of a column; means and squares by Chan et al. (1983, Am. Stat. 37, eq. 2.1)."""
    missing = one.missing + other.missing
    if EMPTY in (one.kind, other.kind):
        return msgspec.structs.replace(other if one.kind == EMPTY else one, missing=missing)
    if one.kind != other.kind:
        raise DataError(
            f"column '{name}' holds numbers at one site and texts at another: read it with categories=['{name}'] at all"
        )
    count = one.count + other.count
    if one.kind == CATEGORY:
        total = Counter(one.categories) + Counter(other.categories)
        named = {text: total[text] for text in sorted(total)}
        rare = one.rare + other.rare
        return ColumnSummary(kind=CATEGORY, count=count, missing=missing, categories=named, rare=rare)
    apart = other.mean - one.mean
    lows, highs = (one.minimum, other.minimum), (one.maximum, other.maximum)
    return ColumnSummary(
        kind=NUMBER,
        count=count,
        missing=missing,
        mean=one.mean + apart * other.count / count,
        squares=one.squares + other.squares + apart**2 * one.count * other.count / count,
        minimum=None if None in lows else min(low for low in lows if low is not None),
        maximum=None if None in highs else max(high for high in highs if high is not None),
    )


def _feature(name: str, summary: ColumnSummary, max_categories: int) -> Feature:
    if summary.kind == EMPTY:
        raise DataError(f"column '{name}' has no value in any training row: leave it out by naming the features")
    if summary.kind == NUMBER:
        std = math.sqrt(summary.squares / summary.count)
        # A column that is constant but for rounding is not stretched, as in scikit-learn.
        constant = std <= 10 * np.finfo(np.float64).eps * abs(summary.mean)
        return Feature(name=name, kind=NUMBER, mean=summary.mean, std=1.0 if constant else std)
    frequent = sorted(summary.categories, key=lambda text: (-summary.categories[text], text))[:max_categories]
    other = summary.rare > 0 or len(summary.categories) > max_categories
    kept = tuple(sorted(frequent))
    return Feature(name=name, kind=CATEGORY, categories=kept, other=other, missing=summary.missing > 0)


def _by_size(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names of classes: by number if all are numbers, else alphabetically.

    >>> _by_size(["10", "9"]), _by_size(["b", "a"])
    (('9', '10'), ('a', 'b'))
    """
    names = list(names)
    try:
        return tuple(sorted(names, key=float))
    except ValueError:
        return tuple(sorted(names))
