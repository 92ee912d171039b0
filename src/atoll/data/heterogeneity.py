"""How far a partition is from IID. Shapes: C clients, K classes, N training samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.data.index import Array, Partition


def label_counts(
    partition: Partition, labels: Array, num_classes: int, clients: Sequence[int] | np.ndarray[Any, np.dtype[Any]]
) -> Array:
    """Count the labels of the given clients, (C, K) int64; every position of a sequence counts as one label."""
    counts_CK = np.zeros((len(clients), num_classes), dtype=np.int64)
    for row, client in enumerate(clients):
        counts_CK[row] = np.bincount(labels[partition.indices(int(client))].ravel(), minlength=num_classes)
    return counts_CK
