"""A small federation that remembers its samples, for attacks on membership."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.parts import find
from atoll.core.plan import Plan
from atoll.core.probe import Guess, Work
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset
from atoll.simulation.seat import Watched


def few(full: Dataset, num: int) -> Dataset:
    """So many training samples of a data set, and at most 2000 test samples."""
    picked = np.random.default_rng(1).permutation(full.num_train)[:num]
    return Dataset(
        name="few",
        train_x=np.asarray(full.train_x)[picked],
        train_y=full.train_y[picked],
        test_x=np.asarray(full.test_x)[:2000],
        test_y=full.test_y[:2000],
        num_classes=full.num_classes,
        scale=full.scale,
    )


def overfitted(num: int, full: Dataset | None = None, **changes: Any) -> Plan:
    """Ten clients that train on half of `num` small digits, again and again; the other half is held out."""
    settings: dict[str, Any] = {
        "data": few(full or digits(), num),
        "partition": {"name": "iid", "num_clients": 10},
        "model": {"name": "mlp_2nn", "hidden": 64},
        "local": {"epochs": 2, "batch_size": 10, "lr": 0.1},
        "evaluation": {"holdout": 0.5},
    }
    return Plan(**{**settings, **changes})


def guess_of(name: str, watched: Watched, candidates: Any, **options: Any) -> Guess:
    work = Work(np.random.default_rng(5), lambda: False, candidates)
    [guess] = find("probes", name)(**options).run(watched.known, watched.sights, work)
    return guess
