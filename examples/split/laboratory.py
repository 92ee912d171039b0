"""What a laboratory brings: its own samples, and what it lets leave. Used by `atoll join --app laboratory:north`."""

import numpy as np

import atoll
from atoll.data.catalog.digits import digits

FLOORS = atoll.Floors(min_cohort=2, split="activations")
"""Activations may leave, labels may not: a plan without `split.tail` is refused."""


def north() -> atoll.ClientApp:
    """A laboratory with the first half of the samples."""
    return laboratory(0)


def south() -> atoll.ClientApp:
    """A laboratory with the second half of the samples."""
    return laboratory(1)


def laboratory(number: int) -> atoll.ClientApp:
    """Every second of the training samples of digits."""
    data = digits()
    mine = np.arange(data.num_train) % 2 == number
    return atoll.ClientApp(
        train_x=data.train_x[mine],
        train_y=data.train_y[mine],
        num_classes=data.num_classes,
        scale=data.scale,
        shift=data.shift,
        floors=FLOORS,
    )
