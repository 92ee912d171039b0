"""How features of each client are changed. Shapes: S samples of a client, I channels, H height, W width, P pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from atoll.core.errors import PlanError
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, changed, disjoint

Change = Callable[[int, Array], Array]


def with_features(rule: str, dataset: Dataset, partition: Partition, change: Change) -> Partition:
    """Let `change(client, x)` give the new features of each client, from the old ones in float32.

    Bytes are rounded and stay within the range that they have in the training set. Samples of nobody and the test set
    stay as they are.
    """
    if dataset.tokens:
        raise PlanError(
            f"{rule} changes features that are amounts, and those of {dataset.name} are tokens; "
            "use a skew that leaves features alone: label_swap or quantity"
        )
    disjoint(partition)
    old_x = dataset.train_x
    new_x = old_x.copy()
    low, high = old_x.min(), old_x.max()
    for client in range(partition.num_clients):
        held_S = partition.indices(client)
        values = change(client, old_x[held_S].astype(np.float32))
        new_x[held_S] = np.clip(np.rint(values), low, high) if old_x.dtype == np.uint8 else values
    return changed(partition, replace(dataset, train_x=new_x))


def with_pictures(rule: str, dataset: Dataset, partition: Partition, change: Change) -> Partition:
    """The same where `change` gets and gives pictures, (S, I, H, W)."""
    if len(dataset.input_shape) != 3 and not dataset.tokens:
        raise PlanError(
            f"{rule} needs pictures of shape (channels, height, width), and a sample of {dataset.name} has shape "
            f"{dataset.input_shape}; reshape the data, or use noise or brightness, which change any features"
        )
    return with_features(rule, dataset, partition, change)


def resampled(x_SIHW: Array, matrix_22: Array) -> Array:
    """Pictures that show at p, counted from the centre as (row, column), what was at matrix_22 @ p.

    Between pixels values are interpolated (bilinear); beyond the edge the edge goes on.
    """
    height, width = x_SIHW.shape[2:]
    last_21 = np.array([[height - 1], [width - 1]])
    to_2P = np.indices((height, width)).reshape(2, -1)
    from_2P = np.clip(matrix_22 @ (to_2P - last_21 / 2) + last_21 / 2, 0, last_21)
    before_2P = np.floor(from_2P).astype(np.int64)
    after_2P = np.minimum(before_2P + 1, last_21)
    share_2P = (from_2P - before_2P).astype(np.float32)
    rows, columns = (((before_2P[axis], 1 - share_2P[axis]), (after_2P[axis], share_2P[axis])) for axis in (0, 1))
    x_SIP = x_SIHW.reshape(*x_SIHW.shape[:2], -1)
    y_SIP = np.zeros_like(x_SIP)
    for (row_P, down_P), (column_P, right_P) in product(rows, columns):
        y_SIP += x_SIP.take(row_P * width + column_P, axis=2) * (down_P * right_P)
    return y_SIP.reshape(x_SIHW.shape)
