"""The recorded step: it does not make what it does not need."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import atoll.train.stack
from atoll import Plan, run
from atoll.train.fuse import tidy

aten = torch.ops.aten


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_no_gradient_is_written_out(
    digits_plan: Plan, algorithm: str, stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's update is one product in place, and what an algorithm adds is added in place."""
    found: list[object] = []

    def watched(graph: GraphModule) -> None:
        tidy(graph)
        found.extend(node.target for node in graph.graph.nodes)

    monkeypatch.setattr(atoll.train.stack, "tidy", watched)
    engine = {"name": "vectorised", "stack": stack}
    run(digits_plan.replace({"rounds": 1, "algorithm": algorithm, "model": "mlp_2nn", "engine": engine}))
    products = aten.baddbmm_.default if stack > 1 else aten.addmm_.default
    assert found.count(products) == 3
    assert aten.cat.default not in found
    assert (aten.lerp_.Tensor in found) == (algorithm == "fedprox")
