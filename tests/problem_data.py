"""Small data sets of every kind of problem, that tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes

from atoll import Dataset


def split(x: Any, y: Any, num_test: int, **fields: Any) -> Dataset:
    order = np.random.default_rng(0).permutation(len(x))
    test, train = order[:num_test], order[num_test:]
    parts = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
    return Dataset(**{"name": "table", **parts, **fields})


def diabetes() -> Dataset:
    x, y = load_diabetes(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return split(x.astype(np.float32), y.astype(np.float32), 90)


def cancer() -> Dataset:
    x, y = load_breast_cancer(return_X_y=True)
    data = split(((x - x.mean(0)) / x.std(0)).astype(np.float32), y.astype(bool), 120)
    large = data.test_x[:, 0] > 0
    return Dataset(
        name="cancer",
        train_x=data.train_x,
        train_y=data.train_y.astype(bool),
        test_x=data.test_x,
        test_y=data.test_y.astype(bool),
        test_groups=large.astype(int),
        group_names=("small", "large"),
    )


def labels() -> Dataset:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 6)).astype(np.float32)
    return split(x, x @ rng.normal(size=(6, 3)) > 0, 100)


def sequences() -> Dataset:
    rng = np.random.default_rng(2)
    x = (np.arange(12) + rng.integers(0, 9, size=(200, 1))) % 9
    y = np.roll(x, -1, axis=1)
    y[:, -1] = -100
    y[::3, 6:] = -100
    return split(x, y, 50, num_classes=9, tokens=True)


def lifetimes() -> Dataset:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    died, left = rng.exponential(np.exp(-(x @ np.array([1.0, -0.5, 0, 0])))), rng.exponential(2, size=300)
    return split(x, np.stack([np.minimum(died, left), died <= left], 1).astype(np.float32), 60, problem="survival")
