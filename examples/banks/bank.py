"""What a bank brings: its own loans, and what it insists on. Used by `atoll join --app bank:client_a`.

Who of 1,000 applicants for a loan was a bad risk (UCI Statlog German Credit)? Each bank has lent for other purposes, so
that its applicants differ from those of the others.
"""

import numpy as np

import atoll
from atoll.data.catalog.german_credit import german_credit

FLOORS = atoll.Floors(secagg=True, min_cohort=4, min_survivors=3, algorithms=("fedavg",), max_model_bytes=1_000_000)
"""The server sees sums of three banks at least, never what one has learnt, and no other algorithm is run."""


def client_a() -> atoll.ClientApp:
    """A bank that finances cars."""
    return bank("new car", "used car")


def client_b() -> atoll.ClientApp:
    """A bank that finances furniture and household appliances."""
    return bank("furniture", "domestic appliances", "repairs")


def client_c() -> atoll.ClientApp:
    """A bank that finances radio and television sets."""
    return bank("radio and television")


def client_d() -> atoll.ClientApp:
    """A bank that finances businesses, education and all else."""
    return bank("business", "education", "retraining", "other")


def bank(*purposes: str) -> atoll.ClientApp:
    """All training applicants for loans of these purposes."""
    data = german_credit()
    mine = np.isin(data.owners, [data.owner_names.index(purpose) for purpose in purposes])
    return atoll.ClientApp(
        train_x=data.train_x[mine], train_y=data.train_y[mine].astype(np.int64), num_classes=2, floors=FLOORS
    )


def applicants() -> atoll.Dataset:
    """The applicants that the server measures the model on: good risks are class 0, bad ones class 1."""
    data = german_credit()
    return atoll.Dataset(
        name="applicants",
        train_x=data.train_x,
        train_y=data.train_y.astype(np.int64),
        test_x=data.test_x,
        test_y=data.test_y.astype(np.int64),
        num_classes=2,
        class_names=("good", "bad"),
        owners=data.owners,
        owner_names=data.owner_names,
        origin=data.origin,
    )
