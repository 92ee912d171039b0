"""Torch's own generator: draws depend on the seed alone, whatever other threads do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from atoll import Plan
from atoll.train.federation import build_federation
from atoll.train.model import build_model
from atoll.train.seeded import seeded


def draws(seed: int) -> Tensor:
    """Some numbers, with time for others in between."""
    with seeded(seed):
        first = torch.rand(4)
        time.sleep(0.02)
        with seeded(seed + 100):
            second = torch.rand(4)
        return torch.stack([first, second, torch.rand(4)])


def test_threads_do_not_disturb_each_other() -> None:
    before = torch.get_rng_state()
    alone = [draws(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draws, range(4)))
    for left, right in zip(alone, together, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert torch.equal(before, torch.get_rng_state())


def test_models_that_are_made_at_once_are_those_that_are_made_alone() -> None:
    plans = [Plan(seed=seed, model={"name": "mlp_2nn", "hidden": 300}) for seed in range(4)]
    federation = build_federation(plans[0])

    def first(plan: Plan) -> list[Tensor]:
        return [parameter.detach() for parameter in build_model(plan, federation).parameters()]

    alone = [first(plan) for plan in plans]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            for left, right in zip(alone, pool.map(first, plans), strict=True):
                assert all(torch.equal(mine, other) for mine, other in zip(left, right, strict=True))
