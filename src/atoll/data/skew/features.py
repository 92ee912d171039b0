"""Changes of clients' features. Shapes: S samples of a client, I channels, H height, W width, P pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from atoll.core.errors import PlanError
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, changed, disjoint
from atoll.data.rows import loaded

Change = Callable[[int, Array], Array]
"""(client, features in float32) -> new features."""


def with_features(rule: str, dataset: Dataset, partition: Partition, change: Change) -> Partition:
    """Replace the features of each client by `change(client, x)`.

    Bytes are rounded and clipped to the range of the training set. Samples without an owner and the test set are not
    changed.
    """
    if dataset.tokens:
        raise PlanError(
            f"{rule} needs numeric features, and those of {dataset.name} are tokens; "
            "use a skew that does not change features: label_swap or quantity"
        )
    disjoint(partition)
    old_x = loaded(dataset.train_x, f"partition {rule}")
    new_x = old_x.copy()
    low, high = old_x.min(), old_x.max()
    for client in range(partition.num_clients):
        held_S = partition.indices(client)
        values = change(client, old_x[held_S].astype(np.float32))
        new_x[held_S] = np.clip(np.rint(values), low, high) if old_x.dtype == np.uint8 else values
    return changed(partition, replace(dataset, train_x=new_x))


def with_images(rule: str, dataset: Dataset, partition: Partition, change: Change) -> Partition:
    """Replace the images of each client, (S, I, H, W), by `change(client, images)`."""
    if len(dataset.input_shape) != 3 and not dataset.tokens:
        raise PlanError(
            f"{rule} needs images of shape (channels, height, width), and a sample of {dataset.name} has shape "
            f"{dataset.input_shape}; reshape the data, or use noise or brightness, which change any features"
        )
    return with_features(rule, dataset, partition, change)


def resampled(x_SIHW: Array, matrix_22: Array) -> Array:
    """Return images whose value at p, counted from the centre as (row, column), is that of x at matrix_22 @ p.

    Values between pixels are interpolated (bilinear); values beyond the edge are those of the edge.
    """
    height, width = x_SIHW.shape[2:]
    last_21 = np.array([[height - 1], [width - 1]])
    target_2P = np.indices((height, width)).reshape(2, -1)
    source_2P = np.clip(matrix_22 @ (target_2P - last_21 / 2) + last_21 / 2, 0, last_21)
    low_2P = np.floor(source_2P).astype(np.int64)
    high_2P = np.minimum(low_2P + 1, last_21)
    weight_2P = (source_2P - low_2P).astype(np.float32)
    rows, columns = (((low_2P[axis], 1 - weight_2P[axis]), (high_2P[axis], weight_2P[axis])) for axis in (0, 1))
    x_SIP = x_SIHW.reshape(*x_SIHW.shape[:2], -1)
    y_SIP = np.zeros_like(x_SIP)
    for (row_P, row_weight_P), (column_P, column_weight_P) in product(rows, columns):
        y_SIP += x_SIP.take(row_P * width + column_P, axis=2) * (row_weight_P * column_weight_P)
    return y_SIP.reshape(x_SIHW.shape)
