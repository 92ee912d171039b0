"""A data set refuses what training would only stumble over later."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.dataset import Dataset


def make(**changes: Any) -> Dataset:
    given: dict[str, Any] = {
        "name": "mine",
        "train_x": np.zeros((6, 4), dtype=np.float32),
        "train_y": np.array([0, 1, 2, 0, 1, 2]),
        "test_x": np.zeros((2, 4), dtype=np.float32),
        "test_y": np.array([0, 1]),
        "num_classes": 3,
    }
    return Dataset(**given | changes)


def test_shapes_and_counts() -> None:
    data = make()
    assert (data.input_shape, data.num_train, data.num_test) == ((4,), 6, 2)
    assert data.train_y.dtype == np.int64
    assert repr(data) == "Dataset('mine': 6 train, 2 test, samples (4,) float32, 3 classes)"


def test_other_floats_and_label_types_are_cast() -> None:
    data = make(train_x=np.ones((6, 4)), train_y=np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8))
    assert data.train_x.dtype == np.float32 and data.train_y.dtype == np.int64


def test_torch_tensors_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    data = make(train_x=torch.ones(6, 4), train_y=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert isinstance(data.train_x, np.ndarray) and data.train_x.sum() == 24


def test_images_are_not_copied() -> None:
    x = np.zeros((6, 1, 8, 8), dtype=np.uint8)
    assert make(train_x=x, test_x=x[:2]).train_x is x


def with_value(value: float) -> np.ndarray[Any, Any]:
    x = np.zeros((6, 4), dtype=np.float32)
    x[4, 1] = x[5, 0] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": np.array([0, 1, 2, 0, 3, 5])}, "mine: train_y: labels must be in 0..2: got 3 at index 4 (2 such)"),
        ({"test_y": np.array([0, -1])}, "test_y: labels must be in 0..2: got -1 at index 1"),
        ({"train_y": np.zeros(6)}, "labels are whole numbers, got float64; use .astype('int64')"),
        ({"train_y": np.zeros((6, 1, 1), dtype=int)}, "or (N, T) for sequences: got (6, 1, 1)"),
        ({"train_y": np.zeros(5, dtype=int)}, "train: 6 samples but 5 labels"),
        (
            {"train_x": np.zeros((0, 4), dtype=np.float32), "train_y": np.zeros(0, dtype=int)},
            "train: there are no samples",
        ),
        ({"train_x": with_value(np.nan)}, "train_x: 2 NaN and 0 Inf values, the first in row 4"),
        ({"train_x": with_value(-np.inf)}, "train_x: 0 NaN and 2 Inf values, the first in row 4"),
        ({"train_x": with_value(1.0).astype(np.float64) * 1e300}, "0 NaN and 2 Inf values"),
        ({"train_x": np.zeros((6, 4), dtype=np.int32)}, "features are uint8 or floats, got int32"),
        ({"test_x": np.zeros((2, 5), dtype=np.float32)}, "train_x has shape (4,), of test_x (5,)"),
        ({"tokens": True}, "tokens are whole numbers, got float32"),
        ({"tokens": True, "train_x": np.full((6, 4), -1)}, "cannot be negative: the smallest is -1"),
        ({"num_classes": 1}, "num_classes must be at least 2: got 1"),
        ({"class_names": ("a", "b")}, "2 class_names for 3 classes"),
        (
            {"owners": np.zeros(5, dtype=int)},
            "owners are 6 whole numbers, one for each sample: got int64 (5,)",
        ),
        ({"owners": np.full(6, 2), "owner_names": ("a", "b")}, "owners must be in 0..1"),
    ],
)
def test_refusals_say_what_and_where(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make(**changes)
