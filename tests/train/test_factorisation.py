"""The factorisation machine: its equation, and ratings that it learns in every engine."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Dataset, Plan, run
from atoll.models.factorisation_machine import factorisation_machine

NUM_USERS, NUM_ITEMS = 12, 8


def test_it_is_rendles_equation() -> None:
    torch.manual_seed(0)
    model = factorisation_machine(10, num_classes=2, factors=3)
    torch.nn.init.normal_(model.weights.weight)  # type: ignore[union-attr,arg-type]
    tokens = torch.tensor([[1, 4, 7], [0, 0, 9]])
    offset, weights, factors = (parameter.detach() for parameter in model.parameters())
    vectors = factors.view(10, 2, 3)
    for row, scores in zip(tokens.tolist(), model(tokens), strict=True):
        pairs = sum((vectors[i] * vectors[j]).sum(-1) for i, j in combinations(row, 2))
        torch.testing.assert_close(scores.detach(), offset + weights[row].sum(0) + pairs)


def ratings() -> Dataset:
    rng = np.random.default_rng(0)
    user, item = np.divmod(np.arange(NUM_USERS * NUM_ITEMS), NUM_ITEMS)
    taste, kind = rng.normal(size=(NUM_USERS, 2)), rng.normal(size=(NUM_ITEMS, 2))
    y = (taste[user] * kind[item]).sum(1).astype(np.float32)
    x = np.stack([user, NUM_USERS + item], 1)
    test = rng.random(len(y)) < 0.2
    return Dataset(
        name="ratings",
        train_x=x[~test],
        train_y=y[~test],
        test_x=x[test],
        test_y=y[test],
        tokens=True,
        owners=user[~test],
    )


@pytest.mark.parametrize("engine", ["inline", {"name": "vectorised", "stack": 4}, {"name": "processes", "workers": 2}])
def test_ratings_are_learnt(engine: Any) -> None:
    plan = Plan(
        data=ratings,
        partition="natural",
        model={"name": "factorisation_machine", "vocabulary": NUM_USERS + NUM_ITEMS, "factors": 4},
        algorithm="fedadam",
        server={"lr": 0.05},
        local={"lr": 0.1, "batch_size": 4, "epochs": 3},
        rounds=60,
        evaluation={"every": 0},
        engine=engine,
    )
    result = run(plan)
    losses = [row["train_loss"] for row in result.history]
    assert losses[-1] < 0.3 * losses[0] and result.test["r2"] > 0
