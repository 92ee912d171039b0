"""Small federations that tests share."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from atoll.core.plan import Plan

torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a slow example is no failure: others use it too
hypothesis.settings.load_profile("any machine")


@pytest.fixture
def digits_plan() -> Plan:
    return Plan(
        partition={"name": "dirichlet", "num_clients": 12, "alpha": 0.5},
        model={"name": "mlp_2nn", "hidden": 16},
        policy={"size": 5},
        local={"lr": 0.1, "batch_size": 16},
        rounds=3,
        engine="inline",
    )
