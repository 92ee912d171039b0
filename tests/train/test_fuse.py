"""The recorded step: it does not make what it does not need."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import atoll.train.stack
from atoll import Plan, run
from atoll.train.fuse import hoist, tidy
from atoll.train.trace import record

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
        found[:] = [node.target for node in graph.graph.nodes]

    monkeypatch.setattr(atoll.train.stack, "tidy", watched)
    engine = {"name": "vectorised", "stack": stack}
    changes = {"rounds": 1, "algorithm": algorithm, "model": "mlp_2nn", "engine": engine, "policy.size": stack}
    run(digits_plan.replace(changes))
    products = aten.baddbmm_.default if stack > 1 else aten.addmm_.default
    assert found.count(products) == 3
    assert aten.cat.default not in found
    assert (aten.lerp_.Tensor in found) == (algorithm == "fedprox")


def test_what_does_not_change_is_computed_once(digits_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCAFFOLD's correction c - c_i is made before the first step, and added in one pass."""
    found: dict[str, list[object]] = {}

    def watched(graph: GraphModule, num_fixed: int) -> GraphModule:
        once = hoist(graph, num_fixed)
        found["once"] = [node.target for node in once.graph.nodes if node.op == "call_function"]
        found["each"] = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        return once

    monkeypatch.setattr(atoll.train.stack, "hoist", watched)
    engine = {"name": "vectorised", "stack": 3}
    changes = {"rounds": 1, "algorithm": "scaffold", "model": "logistic", "engine": engine, "policy.size": 3}
    run(digits_plan.replace(changes))
    assert found["once"] == [aten.sub.Tensor]
    assert found["each"].count(aten.addcmul_.default) == 2  # the correction and the bias; the weights go by a product
    assert aten.sub.Tensor not in found["each"]


def test_what_is_changed_in_place_is_not_taken_out() -> None:
    def step(params: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        scratch = fixed * 2
        scratch.add_(params)
        return scratch

    args = (torch.ones(3), torch.ones(3))
    graph = record(step, args)
    once = hoist(graph, 1)
    assert once(args[1]) == []
    for _ in range(2):
        assert graph(*args)[0].tolist() == [3, 3, 3]
