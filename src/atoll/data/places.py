"""Features of a data set by name, place, range or pattern, for parties that hold some of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from atoll.core.errors import DataError, nearest
from atoll.data.dataset import Dataset
from atoll.data.targets import Array

RANGE = re.compile(r"(\d+)-(\d+)")
BETWEEN = "="
"""Stands between the name of a column and the category that a feature is 1 for."""


def feature_places(dataset: Dataset, wanted: Sequence[int | str], whose: str) -> Array:
    """Return the places of features in a flattened sample, in rising order, each once.

    A text is the name of a feature, the name of a column whose categories are features, a range such as "0-31", or a
    pattern for names; a number is a place.

    >>> x = np.zeros((2, 3), dtype=np.float32)
    >>> named = Dataset(
    ...     name="d", train_x=x, train_y=[0, 1], test_x=x, test_y=[0, 1], num_classes=2,
    ...     feature_names=("age", "sex=f", "sex=m"),
    ... )
    >>> feature_places(named, ["sex"], "a").tolist(), feature_places(named, [0, "1-1"], "a").tolist()
    ([1, 2], [0, 1])
    """
    if dataset.tokens:
        raise DataError(f"{whose}: samples of {dataset.name} are sequences, which have no columns: use a table")
    num = math.prod(dataset.input_shape)
    places = {place for each in wanted for place in _places(dataset, each, num, whose)}
    return np.array(sorted(places), dtype=np.int64)


def _places(dataset: Dataset, wanted: int | str, num: int, whose: str) -> Sequence[int]:
    """Return the places of one of the features, or groups of them, that are wanted."""
    names = dataset.feature_names
    if isinstance(wanted, str):
        columns = [name.partition(BETWEEN)[0] for name in names]
        found = [place for place, name in enumerate(names) if wanted in (name, columns[place])]
        found = found or [place for place, name in enumerate(names) if _matches(name, columns[place], wanted)]
        bounds = None if found else RANGE.fullmatch(wanted)
        if found or bounds is None:
            return found or _unknown(dataset, wanted, sorted(set(columns)), num, whose)
        first, last = (int(end) for end in bounds.groups())
    else:
        first = last = wanted
    if not first <= last < num:
        raise DataError(
            f"{whose}: {wanted} is not a place in a sample of {dataset.name}, which has {num} features: use 0 to "
            f"{num - 1}"
        )
    return range(first, last + 1)


def _matches(name: str, column: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(column, pattern)


def _unknown(dataset: Dataset, wanted: str, columns: Sequence[str], num: int, whose: str) -> Sequence[int]:
    if not columns:
        raise DataError(
            f"{whose}: '{wanted}' names a feature, and those of {dataset.name} have no names: use places, 0 to "
            f'{num - 1}, or ranges such as "0-{num - 1}"'
        )
    raise DataError(f"{whose}: {dataset.name} has no feature '{wanted}': {nearest(wanted, columns)}")
