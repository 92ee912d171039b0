"""Dataset and Public: samples as the rest of Atoll sees them. Shapes: N samples, T positions in a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from atoll.core.errors import DataError, nearest
from atoll.core.parts import Part
from atoll.data.rows import Rows, extremes, is_lazy, lazy_features
from atoll.data.targets import BINARY, CLASSIFICATION, TOKENS, Array, checked_targets, inferred_kind, num_outputs

if TYPE_CHECKING:
    from atoll.data.columns import Table
    from atoll.data.encoding import Encoding
    from atoll.data.tables import TableOptions


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Training and test samples with their targets, checked when it is made; only a server can do without a test set.

    Features keep their stored type (uint8 images are `(N, channels, height, width)`); a model sees `x * scale + shift`.
    A memory-mapped file, or any `atoll.data.rows.Rows`, is read by index when samples are needed, and checked then.
    Token data are indices into a vocabulary and are never scaled. Targets are what `problem` takes: classes `(N,)`, or
    `(N, T)` for sequences; numbers; zeros and ones; times and events.

    >>> x, y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1])
    >>> Dataset(name="mine", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2)
    Dataset('mine': 4 train, 4 test, samples (2,) float32, 2 classes)
    """

    name: str
    train_x: Array | Rows
    train_y: Array
    test_x: Array | Rows
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
    feature_names: tuple[str, ...] = ()
    """Names of the features of a table."""
    encoding: Encoding | None = None
    """How the columns of a table became features."""

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

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        test: float | str | Path = 0.2,
        **options: Unpack[TableOptions],
    ) -> Dataset:
        """Read a CSV file; `columns` names the columns of a file without a header line.

        `target` names the column to learn, or several; `owner` and `group` whose each row is and which group it belongs
        to; `features` the columns to learn from, all others if left out, and `categories` those that are codes. `test`
        is a share drawn by `seed`, another file, or a column that marks test rows. Numbers are standardised and
        categories become zeros and ones by an `encoding` that is fitted from a summary of each owner's training rows,
        or by one that was made before: an `Encoding`, or its file.
        """
        from atoll.data.columns import read_csv

        return cls._from_tables(path, test, partial(read_csv, columns=columns, delimiter=delimiter), options)

    @classmethod
    def from_parquet(
        cls, path: str | Path, *, test: float | str | Path = 0.2, **options: Unpack[TableOptions]
    ) -> Dataset:
        """Read a Parquet file (needs pyarrow); the options are those of `from_csv`."""
        from atoll.data.columns import read_parquet

        return cls._from_tables(path, test, read_parquet, options)

    @classmethod
    def from_pandas(cls, frame: Any, *, test: Any = 0.2, **options: Unpack[TableOptions]) -> Dataset:
        """Take a data frame of pandas, or a mapping from names to values; the options are those of `from_csv`."""
        from atoll.data.columns import table_of

        return cls._from_tables(frame, test, partial(table_of, source=options.get("name", "the table")), options)

    @classmethod
    def from_polars(cls, frame: Any, *, test: Any = 0.2, **options: Unpack[TableOptions]) -> Dataset:
        """Take a data frame of polars; the options are those of `from_csv`."""
        return cls.from_pandas(frame, test=test, **options)

    @classmethod
    def _from_tables(cls, source: Any, test: Any, read: Callable[..., Table], options: TableOptions) -> Dataset:
        from atoll.data.tables import Roles, TableOptions, dataset_fields

        settings: dict[str, Any] = dict(options)
        for option in settings:
            if option not in TableOptions.__annotations__:
                raise DataError(
                    f"there is no option '{option}' of a table: {nearest(option, TableOptions.__annotations__)}"
                )
        if "target" not in settings:
            raise DataError("target is missing: name the column that is to be learnt, target='...'")
        name, seed = settings.pop("name", ""), settings.pop("seed", 0)
        categories = settings.pop("categories", ())
        roles = Roles(**settings)
        encoding = roles.fixed_encoding()
        read = partial(read, categories=categories or (encoding.categories if encoding else ()))
        table = read(source)
        marks = isinstance(test, str) and test in table.names
        if isinstance(test, str) and not marks and not Path(test).exists():
            raise DataError(
                f"{table.source} has no test column '{test}', nor is there such a file: {nearest(test, table.names)}"
            )
        held = test if marks or isinstance(test, float | int) else read(test)
        return cls(name=name or Path(table.source).stem, **dataset_fields(table, roles, held, seed))

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        test: float | str | Path = 0.2,
        seed: int = 0,
        sites: bool = False,
        size: tuple[int, int] | None = None,
        channels: int = 3,
        check: bool = True,
        name: str = "",
    ) -> Dataset:
        """Read images in folders `class/image`, or `site/class/image` with `sites`, when they are needed.

        Images are scaled to `size`, (height, width), that of the first if left out. With `check` all of them are
        decoded once before training, so that a corrupt one is found then.
        """
        from atoll.data.images import folder_fields

        held = test if isinstance(test, float) else Path(test)
        return cls(name=name or Path(path).name, **folder_fields(Path(path), held, seed, sites, size, channels, check))

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any, *, test: float | tuple[Any, Any] = 0.2, seed: int = 0, name: str = "arrays", **about: Any
    ) -> Dataset:
        """Take features and targets; `test` is a share drawn by `seed`, or a pair of features and targets.

        `about` are further fields such as `problem` and `scale`; `owners` and `groups` have a number a row.
        """
        from atoll.data.samples import split_fields

        return cls(name=name, **split_fields(x, y, test, seed, about))

    @classmethod
    def from_torch(
        cls, samples: Any, *, targets: Any = None, test: Any = 0.2, seed: int = 0, name: str = "torch", **about: Any
    ) -> Dataset:
        """Take a torch data set, or any object whose `[i]` is a pair of features and target; features are read lazily.

        Targets are read sample by sample unless `targets` gives them, or the object has them as `targets`. `test` is a
        share, or another such object.
        """
        from atoll.data.samples import map_style, split_fields

        held = test if isinstance(test, float) else map_style(test)
        return cls(name=name, **split_fields(*map_style(samples, targets), held, seed, about))

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        features: str | Sequence[str] | None = None,
        target: str | Sequence[str],
        test: Any = 0.2,
        seed: int = 0,
        name: str = "huggingface",
        **options: Any,
    ) -> Dataset:
        """Take a data set of Hugging Face, or a dictionary of two with the keys `train` and `test`.

        `features` is one column of images or arrays, which is read lazily; or a list of columns of numbers and texts,
        all others if left out, which is read as a table with the options of `from_csv`.
        """
        from atoll.data.samples import hugging_face, split_fields

        if isinstance(dataset, Mapping):
            dataset, test = dataset["train"], dataset.get("test", test)
        if not isinstance(features, str):
            frames = [each if isinstance(each, float | str) else each.to_dict() for each in (dataset, test)]
            return cls.from_pandas(
                frames[0], test=frames[1], target=target, features=features, seed=seed, name=name, **options
            )
        x, y, about = hugging_face(dataset, features, str(target))
        held = test if isinstance(test, float) else hugging_face(test, features, str(target))[:2]
        return cls(name=name, **split_fields(x, y, held, seed, {**about, **options}))

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
    def groups(self) -> tuple[str, ...]:
        """The names of the groups of test samples; none if they have no groups, or each has several targets."""
        if self.test_groups is None or self.train_y.ndim > 1:
            return ()
        return self.group_names or tuple(f"group {number}" for number in range(int(self.test_groups.max()) + 1))

    @property
    def has_classes(self) -> bool:
        """Whether each target is one of `num_classes` classes, so that samples can be dealt by label."""
        return self.num_classes > 0 and self.train_y.dtype.kind == "i"

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the samples; of features that are read by index the first and the last."""
        digest = hashlib.blake2b(digest_size=6)
        for array in (self.train_x, self.train_y, self.test_x, self.test_y, self.owners, self.train_groups):
            if array is None:
                continue
            digest.update(f"{array.shape} {array.dtype}".encode())
            ends = array[np.array([0, len(array) - 1])] if is_lazy(array) else array
            digest.update(np.ascontiguousarray(ends).data)
        return digest.hexdigest()

    def as_part(self) -> Part:
        """Return this data set as a part of a plan: `Plan(data=dataset)`."""

        def held() -> Dataset:
            return self

        held.__module__, held.__qualname__ = "dataset", f"<{self.name} {self.fingerprint}>"
        return Part(held)

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
    x: Array | Rows
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
    if other.tokens:
        highest, allowed = extremes(other.train_x)[1], extremes(dataset.train_x)[1]
        if highest > allowed:
            raise DataError(
                f"{other.name} has tokens up to {highest}, but {dataset.name} only up to {allowed}: choose public data "
                "of the same vocabulary"
            )
    return Public(name=other.name, x=other.train_x, y=None, scale=other.scale, shift=other.shift)


def _features(features: Any, tokens: bool, what: str) -> Array | Rows:
    if is_lazy(features):
        return lazy_features(features, what, tokens)
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


def _check_lengths(x: Array | Rows, y: Array, what: str) -> None:
    if not x.shape or (len(x) == 0 and not what.endswith(": test")):
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
