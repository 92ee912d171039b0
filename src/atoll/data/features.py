"""Features from columns of a table, and splits where none was published. Shapes: N rows, F features, K categories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.data.targets import Array

Texts = Sequence[str] | Array
SPLIT_SEED = 0
EVERY = 5


def every_fifth(strata_N: Array) -> tuple[Array, Array]:
    """Return the rows for training and for test: every fifth of a fixed shuffle sorted by stratum is for test.

    >>> [len(rows) for rows in every_fifth(np.array([0, 1] * 50))]
    [80, 20]
    """
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(strata_N))
    by_stratum = shuffled[np.argsort(strata_N[shuffled], kind="stable")]
    test = np.sort(by_stratum[::EVERY])
    return np.setdiff1d(by_stratum, test), test


def standardised(x_NF: Array, train: Array) -> Array:
    """Return columns with mean 0 and standard deviation 1 over the training rows; constant columns become 0."""
    mean_F, std_F = x_NF[train].mean(axis=0), x_NF[train].std(axis=0)
    scaled: Array = ((x_NF - mean_F) / np.where(std_F > 0, std_F, 1)).astype(np.float32)
    return scaled


def one_hot(values_N: Texts, categories: Texts) -> Array:
    """Return one column of zeros and ones for each category; a value of none of them has zeros only: (N, K).

    >>> one_hot(["b", "a", "?"], ["a", "b"]).tolist()
    [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    columns: Array = (np.asarray(values_N)[:, None] == np.asarray(categories)[None]).astype(np.float32)
    return columns


def numbered(values_N: Texts, names: Texts) -> Array:
    """Return the position of each value among the names: (N,).

    >>> numbered(["b", "a", "b"], ["a", "b"]).tolist()
    [1, 0, 1]
    """
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[value] for value in values_N], dtype=np.int64)
