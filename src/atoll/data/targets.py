"""Targets by the kind of problem that they are for: inferred, checked, and in the type that a loss takes.

Shapes: N samples, T positions of a sequence, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.core.errors import DataError, nearest

Array = np.ndarray[Any, np.dtype[Any]]

IGNORED = -100
"""A position of a sequence with this label counts for nothing, as in PyTorch."""
CLASSIFICATION, BINARY, REGRESSION = "classification", "binary", "regression"
MULTI_LABEL, TOKENS, SURVIVAL = "multi_label", "tokens", "survival"


def inferred_kind(targets: Any, num_classes: int) -> str:
    """Return the kind of problem that targets look like; survival times look like others and must be named.

    >>> inferred_kind(np.array([0, 2, 1]), 3), inferred_kind(np.array([0.5, 2.0]), 0)
    ('classification', 'regression')
    """
    y = np.asarray(targets)
    if y.dtype.kind == "b":
        return MULTI_LABEL if y.ndim == 2 else BINARY
    if y.dtype.kind == "f" and not num_classes:
        return REGRESSION
    return TOKENS if y.ndim == 2 and bool((y == IGNORED).any()) else CLASSIFICATION


def checked_targets(kind: str, targets: Any, num_classes: int, what: str) -> Array:
    """Return targets in the type that losses of a kind take; DataError says what is wrong with others."""
    if kind not in CHECKS:
        raise DataError(f"{what}: there is no kind of problem '{kind}': {nearest(kind, list(CHECKS))}")
    y = np.asarray(targets)
    if y.dtype.kind not in "biuf":
        raise DataError(f"{what}: targets are numbers, got {y.dtype}; number the classes, or cast the values")
    return CHECKS[kind](y, num_classes, what)


def num_outputs(kind: str, targets: Array, num_classes: int) -> int:
    """Return how many outputs a model has for such targets."""
    if kind in (CLASSIFICATION, TOKENS):
        return num_classes
    return int(targets.shape[1]) if targets.ndim == 2 and kind != SURVIVAL else 1


def _classes(y: Array, num_classes: int, what: str) -> Array:
    if num_classes < 2:
        raise DataError(f"{what}: num_classes must be at least 2: got {num_classes}; say how many classes there are")
    return _labels(y, num_classes, what)


def _labels(y: Array, num_classes: int, what: str, *, ignored: bool = False) -> Array:
    if y.dtype.kind not in "iu":
        raise DataError(f"{what}: labels are whole numbers, got {y.dtype}; use .astype('int64')")
    if y.ndim not in (1, 2):
        raise DataError(f"{what}: labels have shape (N,), or (N, T) for sequences: got {y.shape}; reshape them")
    wrong = (y < 0) | (y >= num_classes)
    invalid = np.argwhere(wrong & (y != IGNORED) if ignored else wrong)
    if len(invalid):
        index = tuple(int(i) for i in invalid[0])
        raise DataError(
            f"{what}: labels must be in 0..{num_classes - 1}: got {y[index]} at index {', '.join(map(str, index))} "
            f"({len(invalid)} such); renumber them or raise num_classes"
        )
    return y.astype(np.int64, copy=False)


def _tokens(y: Array, num_classes: int, what: str) -> Array:
    if num_classes < 2:
        raise DataError(f"{what}: num_classes must be at least 2: got {num_classes}; it is the size of the vocabulary")
    found = _labels(y, num_classes, what, ignored=True)
    if found.ndim == 2 and len(found) and bool((found == IGNORED).all(1).any()):
        row = int((found == IGNORED).all(1).argmax())
        raise DataError(f"{what}: all positions of row {row} are padding ({IGNORED}); drop such rows")
    return found


def _zeros_and_ones(y: Array, num_classes: int, what: str) -> Array:
    found = _numbers(y, num_classes, what)
    wrong = np.argwhere((found != 0) & (found != 1))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        raise DataError(
            f"{what}: targets are 0 or 1: got {found[index]:g} at index {', '.join(map(str, index))} ({len(wrong)} "
            "such); threshold them, or use another problem"
        )
    return found


def _one_label(y: Array, num_classes: int, what: str) -> Array:
    if y.ndim != 1:
        raise DataError(f"{what}: a binary problem has one target a sample, (N,): got {y.shape}; use multi_label")
    return _zeros_and_ones(y, num_classes, what)


def _several_labels(y: Array, num_classes: int, what: str) -> Array:
    if y.ndim != 2:
        raise DataError(f"{what}: several labels have shape (N, L): got {y.shape}; use binary for one")
    return _zeros_and_ones(y, num_classes, what)


def _numbers(y: Array, num_classes: int, what: str) -> Array:
    if y.ndim not in (1, 2):
        raise DataError(f"{what}: targets have shape (N,) or (N, L): got {y.shape}; reshape them")
    with np.errstate(over="ignore"):
        found = y.astype(np.float32, copy=False)
    if found.size and not (np.isfinite(found.min()) and np.isfinite(found.max())):
        rows = np.nonzero(~np.isfinite(found))[0]
        raise DataError(f"{what}: {len(rows)} NaN or Inf values, the first in row {rows[0]}; drop these rows")
    return found


def _times_and_events(y: Array, num_classes: int, what: str) -> Array:
    if y.ndim != 2 or y.shape[1] != 2:
        raise DataError(f"{what}: survival has a time and an event a sample, (N, 2): got {y.shape}; stack the two")
    found = _numbers(y, num_classes, what)
    if len(found) and found[:, 0].min() < 0:
        row = int(found[:, 0].argmin())
        raise DataError(f"{what}: survival times cannot be negative: got {found[row, 0]:g} in row {row}; correct them")
    events = found[:, 1]
    if bool(((events != 0) & (events != 1)).any()):
        row = int(((events != 0) & (events != 1)).argmax())
        raise DataError(f"{what}: an event is 1 (seen) or 0 (censored): got {events[row]:g} in row {row}; recode them")
    return found


CHECKS: dict[str, Callable[[Array, int, str], Array]] = {
    CLASSIFICATION: _classes,
    BINARY: _one_label,
    REGRESSION: _numbers,
    MULTI_LABEL: _several_labels,
    TOKENS: _tokens,
    SURVIVAL: _times_and_events,
}
"""Kind of problem -> what its targets must be."""
