"""Dataset and Public: samples as the rest of Atoll sees them. Shapes: N samples, T positions in a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atoll.core.errors import DataError
from atoll.data.targets import BINARY, CLASSIFICATION, TOKENS, Array, checked_targets, inferred_kind, num_outputs


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Training and test samples with their targets, checked when it is made; only a server can do without a test set.

    Features keep their stored type (uint8 images are `(N, channels, height, width)`); a model sees `x * scale + shift`.
    Token data are indices into a vocabulary and are never scaled. Targets are what `problem` takes: classes `(N,)`, or
    `(N, T)` for sequences; numbers; zeros and ones; times and events.

    >>> x, y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1])
    >>> Dataset(name="mine", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2)
    Dataset('mine': 4 train, 4 test, samples (2,) float32, 2 classes)
    """

    name: str
    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    num_classes: int = 0
    """How many classes there are, where targets are classes."""
    scale: float = 1.0
    shift: float = 0.0
    tokens: bool = False
    owners: Array | None = None
    """The natural owner (speaker, device) of each training sample, `(N,)`; None if the data have none."""
    owner_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    """Names of the classes, or of the labels of which a sample may have several."""
    problem: str = ""
    """The kind of problem, such as `regression`; inferred from the targets if left out."""
    train_groups: Array | None = None
    """A group (sex, region) of each training sample, `(N,)`, to compare how well a model does for each."""
    test_groups: Array | None = None
    group_names: tuple[str, ...] = ()
    origin: str = ""
    """Source and licence of the data, in one line."""

    def __post_init__(self) -> None:
        kind = self.problem or inferred_kind(self.train_y, self.num_classes)
        object.__setattr__(self, "problem", kind)
        for part in ("train", "test"):
            x = _features(getattr(self, f"{part}_x"), self.tokens, f"{self.name}: {part}_x")
            y = checked_targets(kind, getattr(self, f"{part}_y"), self.num_classes, f"{self.name}: {part}_y")
            _check_lengths(x, y, f"{self.name}: {part}")
            object.__setattr__(self, f"{part}_x", x)
            object.__setattr__(self, f"{part}_y", y)
        for kind in ("x", "y"):
            train_shape, test_shape = getattr(self, f"train_{kind}").shape[1:], getattr(self, f"test_{kind}").shape[1:]
            if train_shape != test_shape:
                raise DataError(
                    f"{self.name}: one sample of train_{kind} has shape {train_shape}, of test_{kind} {test_shape}; "
                    "give both the same"
                )
        named = self.num_classes or self.num_outputs
        if self.class_names and len(self.class_names) != named:
            raise DataError(f"{self.name}: {len(self.class_names)} class_names for {named} classes; name all or none")
        for part in ("train", "test"):
            groups = getattr(self, f"{part}_groups")
            if groups is not None:
                whose = f"{self.name}: {part}_groups"
                num = len(getattr(self, f"{part}_x"))
                object.__setattr__(self, f"{part}_groups", _numbered(groups, num, self.group_names, whose))
        if self.owners is not None:
            object.__setattr__(
                self, "owners", _numbered(self.owners, self.num_train, self.owner_names, f"{self.name}: owners")
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def num_train(self) -> int:
        """The number of training samples."""
        return len(self.train_x)

    @property
    def num_test(self) -> int:
        """The number of test samples."""
        return len(self.test_x)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of a model for these targets."""
        return num_outputs(self.problem, self.train_y, self.num_classes)

    def for_problem(self, kind: str) -> Dataset:
        """Return these samples with targets of another kind of problem, if theirs can be taken as such."""
        if kind == self.problem:
            return self
        classes = kind in (CLASSIFICATION, TOKENS)
        if classes and not self.num_classes:
            raise DataError(f"{self.name}: {self.problem} targets are no classes: leave the plan's problem out")
        if not classes and self.train_y.dtype.kind == "i" and self.num_classes > 2 and kind == BINARY:
            raise DataError(
                f"{self.name}: a binary problem has two classes: got {self.num_classes}; use classification"
            )
        num_classes, names = (self.num_classes, self.class_names) if classes else (0, ())
        return replace(self, problem=kind, num_classes=num_classes, class_names=names)

    @property
    def has_classes(self) -> bool:
        """Whether each target is one of `num_classes` classes, so that samples can be dealt by label."""
        return self.num_classes > 0 and self.train_y.dtype.kind == "i"

    def __repr__(self) -> str:
        what = f"{self.num_classes} classes" if self.num_classes else self.problem
        return (
            f"Dataset({self.name!r}: {self.num_train} train, {self.num_test} test, "
            f"samples {self.input_shape} {self.train_x.dtype}, {what})"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Public:
    """Samples that server and clients may use: stored features, their scaling, and labels if they have any."""

    name: str
    x: Array
    y: Array | None
    scale: float = 1.0
    shift: float = 0.0


def as_public(other: Dataset, dataset: Dataset) -> Public:
    """Return the features of another data set's training samples, if they fit a model for this data set.

    Its labels are dropped: they may have another meaning.
    """
    if other.input_shape != dataset.input_shape or other.tokens != dataset.tokens:
        shapes = [f"{d.input_shape}{' tokens' if d.tokens else ''}" for d in (other, dataset)]
        raise DataError(
            f"a public sample of {other.name} has shape {shapes[0]}, but one of {dataset.name} has {shapes[1]}: choose "
            'public data of the same shape, or public = {name = "held_out", fraction = 0.05}'
        )
    if other.tokens and other.train_x.max() > dataset.train_x.max():
        raise DataError(
            f"{other.name} has tokens up to {other.train_x.max()}, but {dataset.name} only up to "
            f"{dataset.train_x.max()}: choose public data of the same vocabulary"
        )
    return Public(name=other.name, x=other.train_x, y=None, scale=other.scale, shift=other.shift)


def _features(features: Any, tokens: bool, what: str) -> Array:
    x = np.asarray(features)
    if tokens:
        if x.dtype.kind not in "iu":
            raise DataError(f"{what}: tokens are whole numbers, got {x.dtype}; cast them, or set tokens=False")
        if x.size and x.min() < 0:
            raise DataError(
                f"{what}: tokens are indices and cannot be negative: the smallest is {x.min()}; renumber them from 0"
            )
        return x
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        raise DataError(f"{what}: features are uint8 or floats, got {x.dtype}; use .astype('float32')")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32, copy=False)
    # min and max find any NaN or Inf without a mask as large as the data.
    if x.size and not (np.isfinite(x.min()) and np.isfinite(x.max())):
        rows, nans = np.nonzero(~np.isfinite(x))[0], int(np.isnan(x).sum())
        raise DataError(
            f"{what}: {nans} NaN and {len(rows) - nans} Inf values, the first in row {rows[0]}; "
            "drop these rows or replace the values"
        )
    return x


def _check_lengths(x: Array, y: Array, what: str) -> None:
    if x.ndim == 0 or (len(x) == 0 and not what.endswith(": test")):
        raise DataError(f"{what}: there are no samples; give at least one")
    if len(x) != len(y):
        raise DataError(f"{what}: {len(x)} samples but {len(y)} labels; every sample needs exactly one label")


def _numbered(numbers: Any, num: int, names: tuple[str, ...], what: str) -> Array:
    """Return whose, or of which group, each sample is, as numbers from 0 on."""
    found = np.asarray(numbers)
    if found.dtype.kind not in "iu" or found.shape != (num,):
        raise DataError(f"{what} are {num} whole numbers, one for each sample: got {found.dtype} {found.shape}")
    if found.min() < 0 or (names and found.max() >= len(names)):
        allowed = f"in 0..{len(names) - 1}, as many as there are names," if names else "0 or more"
        raise DataError(f"{what} must be {allowed}: got {found.min()} to {found.max()}; renumber them")
    return found.astype(np.int64, copy=False)
