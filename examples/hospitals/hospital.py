"""What a hospital brings: its own samples, and what it insists on. Used by `atoll join --app hospital:client_a`."""

import numpy as np

import atoll
from atoll.data.catalog.mnist import mnist

FLOORS = atoll.Floors(min_cohort=2, algorithms=("fedavg", "fedprox"), max_model_bytes=10_000_000)
"""No version of one hospital alone, no other algorithm, and no model that is larger than this."""


def client_a() -> atoll.ClientApp:
    """A hospital that sees the digits 0 to 4, and seldom another."""
    return hospital(range(5))


def client_b() -> atoll.ClientApp:
    """A hospital that sees the digits 5 to 9, and seldom another."""
    return hospital(range(5, 10))


def hospital(own: range) -> atoll.ClientApp:
    """All of MNIST's training samples of its own digits, but for one in twenty, which the other hospital has."""
    data = mnist()
    elsewhere = np.arange(data.num_train) % 20 == 0
    mine = np.isin(data.train_y, own) ^ elsewhere
    return atoll.ClientApp(
        train_x=data.train_x[mine],
        train_y=data.train_y[mine],
        num_classes=data.num_classes,
        scale=data.scale,
        shift=data.shift,
        floors=FLOORS,
    )
