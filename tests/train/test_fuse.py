"""The recorded step: it does not make what it does not need, and computes what the step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import grouped
from torch import Tensor, nn
from torch.fx import Graph

import atoll.train.stack
from atoll import Plan, run
from atoll.core.algorithm import Algorithm, LocalTask
from atoll.train.build import build_job
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

    def watched(graph: Graph) -> None:
        tidy(graph)
        found[:] = [node.target for node in graph.nodes]

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

    def watched(graph: Graph, num_fixed: int) -> Graph:
        once = hoist(graph, num_fixed)
        found["once"] = [node.target for node in once.nodes if node.op == "call_function"]
        found["each"] = [node.target for node in graph.nodes if node.op == "call_function"]
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
    recording = record(step, args)
    once = recording._replace(graph=hoist(recording.graph, 1)).function()
    assert once(args[1]) == []
    function = recording.function()
    for _ in range(2):
        assert function(*args)[0].tolist() == [3, 3, 3]


# --- rewrites that must not happen: each step below is only right if one of them is left out -------------------------


def shares_what_is_changed(params: Tensor, x: Tensor) -> list[Tensor]:
    """Two equal products, of which one is changed in place: the backward pass of group norm does this."""
    first = x * x
    first.reciprocal_()
    return [first, x * x]


def shares_over_a_change(params: Tensor, x: Tensor) -> list[Tensor]:
    scratch = x + 1
    view = scratch[0]
    before = scratch * 2
    view.zero_()
    return [before, scratch * 2]


def ones_that_are_changed(params: Tensor, x: Tensor) -> list[Tensor]:
    ones = torch.ones_like(x)
    ones[0].mul_(3)
    return [x * ones]


def zeros_that_are_changed(params: Tensor, x: Tensor) -> list[Tensor]:
    zeros = x.new_zeros(x.shape)
    zeros[0].fill_(2)
    return [x + zeros]


def copy_that_is_changed(params: Tensor, x: Tensor) -> list[Tensor]:
    copy = aten.mul.Scalar(x, 1)
    copy.add_(1)
    return [x * 3, copy]


def original_that_is_changed(params: Tensor, x: Tensor) -> list[Tensor]:
    copy = aten.mul.Scalar(params, 1)
    params.add_(1)
    return [copy * 2]


def product_with_one_that_changes_the_type(params: Tensor, x: Tensor) -> list[Tensor]:
    return [aten.mul.Scalar(x.int(), 1.0), x.int() * torch.ones_like(x)]


def reshaped_in_place(params: Tensor, x: Tensor) -> list[Tensor]:
    scratch = x * 2
    same = scratch.detach()
    scratch.unsqueeze_(0)
    return [same.sum(0), scratch.sum(0)]


def factor_that_is_changed_before_the_bias(params: Tensor, x: Tensor) -> list[Tensor]:
    left, bias = x * 2, params[:, :1, :3]
    product = torch.bmm(left, x)
    left.zero_()
    return [bias + product]


def factors_of_each_other(params: Tensor, x: Tensor) -> list[Tensor]:
    """The weight of a layer is a product of two: each is a factor in the gradient of the other."""
    left, right = params[:, :, :3], params[:, :, 3:]
    grads = torch.bmm(x, right.transpose(1, 2)), torch.bmm(left.transpose(1, 2), x)
    rate = params.new_full((2, 1, 1), -0.5)
    left.addcmul_(grads[0], rate)
    right.addcmul_(grads[1], rate)
    return [params]


def update_that_is_read(params: Tensor, x: Tensor) -> list[Tensor]:
    moved = params[:, :, :3].addcmul_(torch.bmm(x, x), params.new_full((2, 1, 1), -0.5))
    moved.clamp_(-1, 1)
    return [moved * 2]


def a_rate_for_each_entry(params: Tensor, x: Tensor) -> list[Tensor]:
    params[:, :, :3].addcmul_(torch.bmm(x, x), x)
    return [params]


@pytest.mark.parametrize(
    "step",
    [
        shares_what_is_changed,
        shares_over_a_change,
        ones_that_are_changed,
        zeros_that_are_changed,
        copy_that_is_changed,
        original_that_is_changed,
        product_with_one_that_changes_the_type,
        reshaped_in_place,
        factor_that_is_changed_before_the_bias,
        factors_of_each_other,
        update_that_is_read,
        a_rate_for_each_entry,
    ],
)
def test_tidying_changes_no_result(step: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(2, 3, 3, generator=generator) + 1
    params = torch.rand(2, 3, 6, generator=generator) + 1
    expected_params = params.clone()
    expected = [each.clone() for each in step(expected_params, x.clone())]
    recording = record(step, (params.clone(), x.clone()))
    tidy(recording.graph)
    function = recording.function()
    for _ in range(2):  # a replay leaves nothing behind
        again = params.clone()
        for wanted, got in zip(expected, function(again, x.clone()), strict=True):
            assert got.dtype == wanted.dtype
            assert torch.allclose(got, wanted, atol=1e-5)
        assert torch.allclose(again, expected_params, atol=1e-5)


def factored(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A layer whose weight is a product of two, as in low-rank adaptation."""

    class Factored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.randn(64, 4) / 4)
            self.right = nn.Parameter(torch.randn(4, num_classes) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ (self.left @ self.right)

    return Factored()


def anchored() -> Algorithm:
    """Pull towards 0.1, written so that the parameters themselves are a term of the gradient."""

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return grad_D + params_D - torch.full_like(params_D, 0.1)

    return Algorithm(local_grad=local_grad)


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [(factored, "fedavg"), (grouped, "fedsam"), ({"name": "mlp_2nn", "hidden": 8}, anchored)],
    ids=["factored", "group norm with fedsam", "parameters as a term"],
)
def test_recorded_steps_equal_the_plain_loop(digits_plan: Plan, model: Any, algorithm: Any, stack: int) -> None:
    changes = {"rounds": 1, "policy.size": 3, "local.batch_size": "all"}
    plan = Plan(**{**vars(digits_plan), "model": model, "algorithm": algorithm}).replace(changes)
    recorded = run(plan.replace({"engine": {"name": "vectorised", "stack": stack}}))
    assert recorded.engine["stack"] == stack
    expected_D = run(plan).params_D
    assert (recorded.params_D - expected_D).abs().max() < 2e-6
    assert (build_job(plan).first_D - expected_D).abs().max() > 1e-2
