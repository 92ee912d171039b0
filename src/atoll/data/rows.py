"""Features that are read by index when they are needed, for data larger than memory. Shapes: N samples, B read at once.

A memory-mapped file, or any object that satisfies `Rows`, may be the features of a `Dataset`. What is read is checked
then: its shape, its type, and that numbers are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np

from atoll.core.errors import AtollError, DataError
from atoll.data.targets import Array

LOADED_BYTES = 1 << 30
"""Features that are read by index are loaded, where all of them are needed at once, up to this size."""
BLOCK_BYTES = 1 << 24
"""Blocks of about this size are read at once where all features are looked at."""


@runtime_checkable
class Rows(Protocol):
    """A source of samples: read with rising indices, each once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of samples, then the shape of one."""

    @property
    def dtype(self) -> Any:
        """The NumPy type of what is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> Any:
        """Return the samples at an array of indices, one row each."""


@final
class LazyFeatures:
    """Features of a data set that stay where they are until they are read: uint8, float32, or int64 for tokens.

    >>> lazy = LazyFeatures(MapRows([np.zeros(2), np.ones(2)]), "mine")
    >>> lazy.shape, lazy.dtype, lazy[np.array([1, 1, 0])][:, 0]
    ((2, 2), dtype('float32'), array([1., 1., 0.], dtype=float32))
    """

    def __init__(self, source: Any, name: str, tokens: bool = False) -> None:
        stored = np.dtype(source.dtype)
        allowed = "iu" if tokens else "f"
        if stored.kind not in allowed and (tokens or stored != np.uint8):
            wanted = "whole numbers, as they are tokens" if tokens else "uint8 or floats"
            raise DataError(f"{name}: features are {wanted}, got {stored}; convert them where they are stored or read")
        if not source.shape or source.shape[0] != len(source):
            raise DataError(f"{name}: its shape {tuple(source.shape)} does not begin with its length {len(source)}")
        self.source, self.name, self.tokens = source, name, tokens
        self.shape = tuple(int(size) for size in source.shape)
        self.dtype: np.dtype[Any] = stored if stored == np.uint8 else np.dtype(np.int64 if tokens else np.float32)
        if len(self):
            self[0]  # what cannot be read at all is said before training

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The size of all features in memory."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __getitem__(self, index: int | slice | Array) -> Array:
        if isinstance(index, slice):
            return self._read(np.arange(*index.indices(len(self))))
        if np.ndim(index) == 0:
            sample: Array = self._read(np.array([index]))[0]
            return sample
        indices = np.asarray(index)
        unique, places = np.unique(indices, return_inverse=True)
        rows = self._read(unique)
        return rows if len(unique) == len(indices) and (unique == indices).all() else rows[places]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype=dtype or self.dtype)

    def blocks(self) -> Iterator[Array]:
        """Yield all features in order, some at a time."""
        step = max(1, BLOCK_BYTES * len(self) // max(1, self.nbytes))
        for start in range(0, len(self), step):
            yield self[start : start + step]

    def _read(self, indices: Array) -> Array:
        try:
            raw = np.asarray(self.source[indices])
        except AtollError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.name}: samples {_some(indices)} cannot be read: {type(error).__name__}: {error}; correct the "
                "source, which is given an array of rising indices"
            ) from error
        if raw.shape != (len(indices), *self.shape[1:]):
            raise DataError(
                f"{self.name}: samples {_some(indices)} were read with shape {raw.shape}, not "
                f"{(len(indices), *self.shape[1:])}; every sample must have the same shape"
            )
        with np.errstate(over="ignore"):
            rows: Array = np.array(raw, dtype=self.dtype, order="C")  # a copy: attacks write to it
        if self.dtype.kind != "u" and rows.size:
            low, high = rows.min(), rows.max()
            if not (np.isfinite(low) and np.isfinite(high)):
                row = indices[np.nonzero(~np.isfinite(rows))[0][0]]
                raise DataError(f"{self.name}: a NaN or Inf value in row {row}; drop such rows or replace the values")
            if self.tokens and low < 0:
                raise DataError(f"{self.name}: tokens cannot be negative, but the smallest is {low}; renumber them")
        return rows


@final
class MapRows:
    """Rows of a map-style object: `samples[i]` is one sample, or `sample(samples[i])` if a function is given."""

    def __init__(self, samples: Any, sample: Callable[[Any], Any] | None = None) -> None:
        if not len(samples):
            raise DataError("there are no samples; give at least one")
        self._samples, self._sample = samples, sample
        first = self._one(0)
        self.shape: tuple[int, ...] = (len(samples), *first.shape)
        self.dtype = first.dtype

    def _one(self, index: int) -> Array:
        found = self._samples[index]
        return np.asarray(found if self._sample is None else self._sample(found))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Array) -> Array:
        rows = [self._one(int(index)) for index in indices]
        for index, row in zip(indices, rows, strict=True):
            if row.shape != self.shape[1:]:
                raise DataError(
                    f"sample {index} has shape {row.shape}, but the first {self.shape[1:]}; make them equal"
                )
        return np.stack(rows) if rows else np.zeros((0, *self.shape[1:]), self.dtype)


def file_rows(paths: Sequence[str | Path], read: Callable[[Path], Any]) -> MapRows:
    """Return rows that are files, each opened by `read` when it is needed."""

    def sample(path: str | Path) -> Array:
        try:
            return np.asarray(read(Path(path)))
        except AtollError:
            raise
        except Exception as error:
            raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}; repair or remove it") from error

    return MapRows(paths, sample)


@final
class PickedRows:
    """Some rows of another source, by their indices there."""

    def __init__(self, rows: Any, picked: Array) -> None:
        self._rows, self._picked = rows, picked
        self.shape: tuple[int, ...] = (len(picked), *rows.shape[1:])
        self.dtype = rows.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Array) -> Array:
        read: Array = self._rows[self._picked[indices]]
        return read


@final
class ChainedRows:
    """The rows of one source, then those of another."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second
        self.shape: tuple[int, ...] = (len(first) + len(second), *first.shape[1:])
        self.dtype = first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Array) -> Array:
        cut = np.searchsorted(indices, len(self._first))
        return np.concatenate([self._first[indices[:cut]], self._second[indices[cut:] - len(self._first)]])


def is_lazy(features: Any) -> bool:
    """Return whether features are read by index: a memory-mapped file, or rows that are no array."""
    if isinstance(features, np.ndarray):
        while isinstance(features, np.ndarray):
            if isinstance(features, np.memmap) and getattr(features, "_mmap", None) is not None:
                return True
            features = features.base
        return False
    if isinstance(features, LazyFeatures):
        return True
    return isinstance(features, Rows) and not hasattr(features, "__array__")


def lazy_features(features: Any, name: str, tokens: bool) -> LazyFeatures:
    """Return features that are read by index, with checks of what is read."""
    return features if isinstance(features, LazyFeatures) else LazyFeatures(features, name, tokens)


def picked_rows(features: Any, picked: Array) -> Any:
    """Return some rows: a copy if they lie in memory, else a view."""
    if isinstance(features, LazyFeatures):
        return LazyFeatures(PickedRows(features, picked), features.name, features.tokens)
    return features[picked]


def loaded(features: Any, why: str) -> Array:
    """Return features as an array in memory; refuse what is too large for that."""
    if isinstance(features, LazyFeatures) and features.nbytes > LOADED_BYTES:
        raise DataError(
            f"{why} needs all features in memory, and those of {features.name} take {features.nbytes / 1e9:.1f} GB, "
            f"more than the {LOADED_BYTES / 1e9:.1f} GB that are loaded: leave it out, or prepare such data beforehand"
        )
    return np.asarray(features)


def extremes(features: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest value, of what is read by index a block at a time."""
    if not isinstance(features, LazyFeatures):
        return features.min(), features.max()
    ends = [(block.min(), block.max()) for block in features.blocks()]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _some(indices: Array) -> str:
    return ", ".join(map(str, indices[:3])) + (", ..." if len(indices) > 3 else "")
