"""Handwritten digits of 8x8 pixels, part of the package: needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import every_fifth

SUMMARY = "1,797 handwritten digits, 8x8 grey, 10 classes; needs no download"
SIZE = "none"


def digits() -> Dataset:
    """Load Optical Recognition of Handwritten Digits, its test part of 1,797 (Alpaydin and Kaynak 1998, UCI).

    The data have no split: every fifth sample of a fixed shuffle sorted by class is for test, 360 in total.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        x, y = stored["images"][:, None], stored["labels"].astype(np.int64)
    train, test = every_fifth(y)
    return Dataset(
        name="digits",
        train_x=x[train],
        train_y=y[train],
        test_x=x[test],
        test_y=y[test],
        num_classes=10,
        scale=1 / 16,
        class_names=tuple("0123456789"),
        origin="UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998), CC BY 4.0",
    )
