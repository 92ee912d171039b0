"""Data sets from arrays and from objects that give one sample at a time, such as those of torch and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atoll.core.errors import DataError, nearest
from atoll.data.rows import MapRows, is_lazy, lazy_features, picked_rows
from atoll.data.tables import drawn_rows
from atoll.data.targets import CLASSIFICATION, TOKENS, Array


def split_fields(x: Any, y: Any, test: float | tuple[Any, Any], seed: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Dataset` of features and targets; `test` is a share, or features and targets."""
    fields = dict(about)
    x = lazy_features(x, "train_x", fields.get("tokens", False)) if is_lazy(x) else np.asarray(x)
    y = np.asarray(y)
    if len(x) != len(y):
        raise DataError(f"there are {len(x)} samples but {len(y)} targets: every sample needs one target")
    if isinstance(test, float | int):
        is_test = drawn_rows(len(x), float(test), seed)
        train, held = np.flatnonzero(~is_test), np.flatnonzero(is_test)
        fields |= {"test_x": picked_rows(x, held), "test_y": y[held]}
        x, y = picked_rows(x, train), y[train]
        if fields.get("groups") is not None:
            groups = np.asarray(fields.pop("groups"))
            fields |= {"train_groups": groups[train], "test_groups": groups[held]}
        if fields.get("owners") is not None:
            fields["owners"] = np.asarray(fields["owners"])[train]
    else:
        fields |= {"test_x": test[0], "test_y": np.asarray(test[1]), "train_groups": fields.pop("groups", None)}
    fields.pop("groups", None)
    fields |= {"train_x": x, "train_y": y}
    return fields | _classes(fields)


def map_style(samples: Any, targets: Any = None) -> tuple[Any, Array]:
    """Return features and targets of an object whose samples are pairs, such as a torch `Dataset`.

    Features are read when they are needed. Targets are those given, or those that the object has as `targets`, or are
    read sample by sample.
    """
    tensors = getattr(samples, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return np.asarray(tensors[0]), np.asarray(tensors[1])
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(
            f"{type(samples).__name__} cannot be read by index: give an object with __len__ and __getitem__, or save "
            "its samples to a file and map that with np.load(path, mmap_mode='r')"
        )
    if not len(samples):
        raise DataError("there are no samples: give at least two")
    first = samples[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise DataError(f"a sample is {type(first).__name__}: it must be a pair (features, target)")
    targets = targets if targets is not None else getattr(samples, "targets", None)
    if targets is None:
        targets = [np.asarray(samples[index][1]) for index in range(len(samples))]
    return MapRows(samples, _features), np.asarray(targets)


def hugging_face(dataset: Any, feature: str, target: str) -> tuple[Any, Array, dict[str, Any]]:
    """Return features and targets of two columns, and the names of classes; features are read when needed."""
    for name, role in ((feature, "feature"), (target, "target")):
        if name not in dataset.column_names:
            raise DataError(f"the data set has no {role} column '{name}': {nearest(name, dataset.column_names)}")
    names = getattr(dataset.features[target], "names", None)
    about = {"num_classes": len(names), "class_names": tuple(names)} if names else {}
    rows = MapRows(dataset.select_columns([feature]), _Field(feature))
    return rows, np.asarray(dataset[target][:]), about


class _Field:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sample: Any) -> Array:
        value = sample[self.name]
        if hasattr(value, "convert"):  # an image: (height, width, channels) -> (channels, height, width)
            pixels = np.asarray(value)
            return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype.kind == "f" else array


def _features(sample: Sequence[Any]) -> Any:
    return sample[0]


def _classes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many classes there are, where targets are classes and nobody said so."""
    if fields.get("num_classes"):
        return {}
    both = [fields["train_y"], fields["test_y"]]
    if any(y.dtype.kind in "USO" for y in both):
        names = sorted({str(name) for y in both for name in y.tolist()})
        numbers = [np.searchsorted(names, y.astype(str)) for y in both]
        return {"train_y": numbers[0], "test_y": numbers[1], "num_classes": len(names), "class_names": tuple(names)}
    if fields.get("problem", CLASSIFICATION) in (CLASSIFICATION, TOKENS) and both[0].dtype.kind in "iu":
        return {"num_classes": max(2, int(max(y.max() for y in both)) + 1)}
    return {}
