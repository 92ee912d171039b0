"""Heart disease at four hospitals, as FLamby prepares it. Shapes: N patients, F features."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, RawFile, Source
from atoll.data.targets import BINARY, Array
from atoll.data.unpack import as_is

SUMMARY = "heart disease, 740 patients of 4 hospitals, 13 features, binary; as in FLamby"
SIZE = "0.1 MB"

FILES = (
    RawFile(
        name="processed.cleveland.data",
        num_bytes=18_461,
        sha256="a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    ),
    RawFile(
        name="processed.hungarian.data",
        num_bytes=10_263,
        sha256="d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    ),
    RawFile(
        name="processed.switzerland.data",
        num_bytes=4_109,
        sha256="834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    ),
    RawFile(
        name="processed.va.data",
        num_bytes=6_737,
        sha256="e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
    ),
)
HOME = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
SOURCES = (Source(route=Https(tuple(f"{HOME}/{file.name}" for file in FILES)), unpack=as_is),)

HOSPITALS = ("Cleveland", "Budapest", "Zurich and Basel", "Long Beach")
SEX = 1
CHEST_PAIN, ECG = 2, 6
"""The columns of categories: 1 to 4, and 0 to 2."""
NUMBERS = (0, 1, 3, 4, 5, 7, 8, 9)
"""Age, sex, blood pressure, cholesterol, blood sugar, heart rate, angina, ST depression: features as they are."""
USED = 10
"""Slope, vessels and thal, which follow, are missing at most hospitals and left out."""
TRAIN_SHARE = 0.66
SPLIT_SEED = 43
MIN_OF_A_CLASS = 3
"""With fewer of a class, a hospital is split without regard to classes."""
Scaling = Literal["hospital", "pooled"]


def heart(
    *,
    train_scaling: Scaling = "hospital",
    test_scaling: Scaling = "pooled",
    group: Literal["sex", "hospital"] = "sex",
    quiet: bool = False,
) -> Dataset:
    """Load 486 patients for training and 254 for test (Janosi et al. 1989; FLamby, du Terrail 2022, arXiv:2210.04620).

    Owners are the hospitals: 199, 172, 30 and 85 patients for training, 104, 89, 16 and 45 for test. Features, split
    and scaling are those of FLamby's fed_heart_disease, to the bit of its figures: patients with a missing value are
    dropped, training patients are scaled by mean and deviation of their hospital's, and its pooled test by those of all
    training patients. Choose `test_scaling = "hospital"` for its tests of single centres. Groups are for comparison.
    """
    paths = raw_files("heart", FILES, SOURCES, quiet=quiet)
    tables = [_complete_rows(paths[file.name]) for file in FILES]
    tests = [_test_rows(table[:, -1]) for table in tables]
    x_NF, y_N, sex_N = (np.concatenate(parts) for parts in zip(*(_columns(table) for table in tables), strict=True))
    hospital_N = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    test_N = np.concatenate([np.isin(np.arange(len(table)), rows) for table, rows in zip(tables, tests, strict=True)])
    scaled = {"hospital": _scaled_by(hospital_N, x_NF, ~test_N), "pooled": _scaled_by(0 * hospital_N, x_NF, ~test_N)}
    group_N, names = (sex_N, ("female", "male")) if group == "sex" else (hospital_N, HOSPITALS)
    return Dataset(
        name="heart",
        train_x=scaled[train_scaling][~test_N],
        train_y=y_N[~test_N],
        test_x=scaled[test_scaling][test_N],
        test_y=y_N[test_N],
        problem=BINARY,
        owners=hospital_N[~test_N],
        owner_names=HOSPITALS,
        train_groups=group_N[~test_N],
        test_groups=group_N[test_N],
        group_names=names,
        origin="UCI Heart Disease (Janosi, Steinbrunn, Pfisterer and Detrano 1989), CC BY 4.0; prepared as in FLamby",
    )


def stratified(y_N: Array, num_train: int, num_test: int, seed: int) -> Array:
    """Return the test rows of scikit-learn's `train_test_split(..., stratify=y)`, by the same draws.

    Each class gives its share of rows, rounded down; the rows that are still missing come from the classes with the
    largest remainders, ties at random.
    """
    rng = np.random.RandomState(seed)
    classes, class_N, counts = np.unique(y_N, return_inverse=True, return_counts=True)
    rows_of = np.split(np.argsort(class_N, kind="mergesort"), np.cumsum(counts)[:-1])
    trains = _share_out(counts, num_train, rng)
    tests = _share_out(counts - trains, num_test, rng)
    test: list[int] = []
    for k in range(len(classes)):
        permutation = rng.permutation(counts[k])
        test.extend(rows_of[k].take(permutation)[trains[k] : trains[k] + tests[k]])
    return np.array(test)


def _share_out(counts: Array, num: int, rng: np.random.RandomState) -> Array:
    exact = counts / counts.sum() * num
    shares: Array = np.floor(exact)
    missing = int(num - shares.sum())
    if missing > 0:
        remainder = exact - shares
        for value in np.sort(np.unique(remainder))[::-1]:
            (largest,) = np.where(remainder == value)
            taken = min(len(largest), missing)
            shares[rng.choice(largest, size=taken, replace=False)] += 1
            missing -= taken
            if missing == 0:
                break
    return shares.astype(np.int64)


def _complete_rows(path: Path) -> Array:
    """Return the used columns and the diagnosis of the patients without a missing value among them."""
    rows = [line.split(",") for line in path.read_text(encoding="ascii").splitlines() if line]
    used = [[*row[:USED], row[-1]] for row in rows]
    return np.array([[float(value) for value in row] for row in used if "?" not in row])


def _columns(table: Array) -> tuple[Array, Array, Array]:
    """Return features (N, 13), disease (N,) and sex (N,)."""
    numbers = [table[:, column] for column in NUMBERS]
    pain = [table[:, CHEST_PAIN] == kind for kind in (2, 3, 4)]
    ecg = [table[:, ECG] == kind for kind in (1, 2)]
    x_NF = np.column_stack([*numbers, *pain, *ecg]).astype(np.float32)
    return x_NF, (table[:, -1] != 0).astype(np.float32), table[:, SEX].astype(np.int64)


def _test_rows(diagnosis_N: Array) -> Array:
    y_N = diagnosis_N != 0
    num = len(y_N)
    num_train, num_test = int(TRAIN_SHARE * num), ceil((1.0 - TRAIN_SHARE) * num)
    if min(y_N.sum(), num - y_N.sum()) >= MIN_OF_A_CLASS:
        return stratified(y_N, num_train, num_test, SPLIT_SEED)
    test: Array = np.random.RandomState(SPLIT_SEED).permutation(num)[:num_test]
    return test


def _scaled_by(owner_N: Array, x_NF: Array, train_N: Array) -> Array:
    """Scale every row by mean and deviation (of n - 1) of its owner's training rows."""
    scaled = np.empty_like(x_NF)
    for owner in np.unique(owner_N):
        own = owner_N == owner
        fitted = x_NF[own & train_N].astype(np.float64)
        mean_F, std_F = fitted.mean(axis=0), fitted.std(axis=0, ddof=1)
        scaled[own] = (x_NF[own] - mean_F) / (std_F + 1e-9)
    return scaled
