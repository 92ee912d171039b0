"""Public samples from the training set."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Range, Seed
from atoll.data.dataset import Dataset, Public
from atoll.data.index import generator
from atoll.data.rows import picked_rows

PURPOSE = 120


BOTH = "leave samples on both sides"


def held_out(
    dataset: Dataset,
    *,
    fraction: Annotated[float, Range(0, 1, open_low=True, open_high=True, hint=BOTH)] = 0.05,
    seed: Seed = 0,
) -> tuple[Dataset, Public]:
    """Split off a random share of the training samples; return the data set without them, and the public samples."""
    num_public = round(fraction * dataset.num_train)
    if not 1 <= num_public < dataset.num_train:
        raise PlanError(
            f"held_out: fraction must be in (0, 1) and leave samples on both sides, got {fraction} of "
            f"{dataset.num_train} training samples; change it"
        )
    permutation = generator(seed, PURPOSE).permutation(dataset.num_train)
    public, private = np.sort(permutation[:num_public]), np.sort(permutation[num_public:])
    remaining = replace(
        dataset,
        train_x=picked_rows(dataset.train_x, private),
        train_y=dataset.train_y[private],
        owners=None if dataset.owners is None else dataset.owners[private],
        train_groups=None if dataset.train_groups is None else dataset.train_groups[private],
    )
    held = Public(
        name=f"{num_public} held out of {dataset.name}",
        x=picked_rows(dataset.train_x, public),
        y=dataset.train_y[public],
        scale=dataset.scale,
        shift=dataset.shift,
    )
    return remaining, held
