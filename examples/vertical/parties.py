"""What a bank and a shop bring: columns of the rows that both hold. Used by `atoll join --app parties:bank`."""

import csv
from pathlib import Path

import numpy as np

import atoll

USUAL = {
    "age": (49, 18),
    "income": (50, 15),
    "debts": (20, 12),
    "visits": (15, 9),
    "spent": (390, 260),
    "returned": (5, 4),
}
"""Column -> a usual value and how far others are from it, agreed on beforehand, so that all scale alike."""
BANK, SHOP = ("age", "income", "debts"), ("visits", "spent", "returned")


def bank() -> atoll.ClientApp:
    """The bank, which knows who paid late, and lets the server see that of single rows."""
    table = read("bank-aligned/bank.csv")
    return atoll.ClientApp(
        train_x=scaled(table, BANK),
        train_y=np.array(table["late"], dtype=np.int64),
        num_classes=2,
        columns=BANK,
        rows="bank-aligned/bank.csv",
        floors=atoll.Floors(min_cohort=2, split="labels"),
    )


def shop() -> atoll.ClientApp:
    """The shop, which has no labels."""
    table = read("shop-aligned/shop.csv")
    return atoll.ClientApp(
        train_x=scaled(table, SHOP),
        columns=SHOP,
        rows="shop-aligned/shop.csv",
        floors=atoll.Floors(min_cohort=2, split="activations"),
    )


def whole() -> atoll.Dataset:
    """What the server measures models on: rows with all columns, of customers who agreed to it."""
    return dataset("test.csv", "test.csv", (*BANK, *SHOP))


def dataset(train: str, test: str, columns: tuple[str, ...]) -> atoll.Dataset:
    """Return tables with labels as a data set."""
    tables = read(train), read(test)
    (train_x, train_y), (test_x, test_y) = (
        (scaled(table, columns), np.array(table["late"], dtype=np.int64)) for table in tables
    )
    return atoll.Dataset(
        name="customers",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        num_classes=2,
        feature_names=columns,
    )


def read(path: str) -> dict[str, list[str]]:
    """Read a table by columns."""
    with Path(path).open() as file:
        head, *rows = csv.reader(file)
    return dict(zip(head, map(list, zip(*rows, strict=True)), strict=True))


def scaled(table: dict[str, list[str]], columns: tuple[str, ...]) -> np.ndarray:
    """Return columns as numbers around 0."""
    values = [(np.array(table[name], dtype=np.float32) - USUAL[name][0]) / USUAL[name][1] for name in columns]
    return np.stack(values, axis=1).astype(np.float32)
