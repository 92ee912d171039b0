"""Low-rank adapters (Hu et al. 2022, arXiv:2106.09685): a frozen layer W x gets s B A x beside it; A, B are trained.

Shapes: R rank, I inputs, O outputs, C clients, D parameters, M values of a model, H of which the server alone moves.
A layer with an adapter has the attributes `lora_A` and `lora_B`, whose names end up in those of their parameters,
`scaling`, and `base_layer`, which is frozen: so does peft name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.algorithm import ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, Update
from atoll.core.params import ParamSpec, Slot

FACTOR = re.compile(r"(?:^|\.)lora_(A|B)\.")
REST = "rest"


class Pair(NamedTuple):
    """The slots of the two factors of one layer, and of what the server adds to the layer."""

    a: Slot
    """(R, I)"""
    b: Slot
    """(O, R)"""
    rest: Slot | None
    """(O, I); None where the server adds nothing."""


class WithRest(nn.Module):
    """A frozen layer W with a sum of products P beside it that the server alone moves: W x + s P x."""

    held_buffers = (REST,)

    def __init__(self, base_layer: nn.Module, scaling: float, like: Tensor, shape: tuple[int, int]) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, scaling
        self.register_buffer(REST, torch.zeros(shape, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return what both give together."""
        rest: Tensor = self.get_buffer(REST)
        output: Tensor = self.base_layer(x)
        return output + self.scaling * functional.linear(x.to(rest.dtype), rest).to(output.dtype)


def adapted_layers(model: nn.Module, algorithm: str, ranks: tuple[int, ...] = ()) -> dict[str, nn.Module]:
    """Return the layers of a model that have adapters, by name; PlanError where an algorithm finds none to work on."""
    layers = {name: each for name, each in model.named_modules() if _weight(each, "A") is not None}
    if not layers:
        raise PlanError(
            f"{algorithm} is about pairs of low-rank factors, and {type(model).__name__} has none: use a model with "
            'them, e.g. model = {name = "hf_causal", path = "...", tune = "lora"}, or fedavg'
        )
    least = min(len(factor(layer, "A")) for layer in layers.values())
    if max(ranks, default=0) > least:
        raise PlanError(
            f"{algorithm}: a client cannot have rank {max(ranks)} in a model whose factors have rank {least}: lower "
            "algorithm.ranks, or raise model.rank"
        )
    return layers


def factor(layer: nn.Module, which: str) -> nn.Parameter:
    """Return factor "A" or "B" of a layer that has an adapter."""
    weight = _weight(layer, which)
    assert weight is not None
    return weight


def factor_layer(layer: nn.Module, which: str) -> nn.Module:
    """Return the linear layer that multiplies by factor "A" or "B"."""
    found = _factor_layer(layer, which)
    assert isinstance(found, nn.Module)
    return found


def _weight(layer: nn.Module, which: str) -> nn.Parameter | None:
    weight = getattr(_factor_layer(layer, which), "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _factor_layer(layer: nn.Module, which: str) -> object:
    found = getattr(layer, f"lora_{which}", None)
    return next(iter(found.values()), None) if isinstance(found, nn.ModuleDict) else found


def scaling_of(layer: nn.Module) -> float:
    """Return what the product of a layer's factors is multiplied by."""
    scaling = layer.scaling
    return float(next(iter(scaling.values())) if isinstance(scaling, Mapping) else scaling)  # type: ignore[arg-type]


def add_rest(model: nn.Module, algorithm: str, ranks: tuple[int, ...] = ()) -> None:
    """Put a matrix beside every layer that has an adapter, for what the factors cannot hold."""
    for layer in adapted_layers(model, algorithm, ranks).values():
        a, b = factor(layer, "A"), factor(layer, "B")
        assert isinstance(layer.base_layer, nn.Module)
        layer.base_layer = WithRest(layer.base_layer, scaling_of(layer), a, (b.shape[0], a.shape[1]))


def rank_mask(ranks: tuple[int, ...]) -> Callable[[ParamSpec, int], Tensor] | None:
    """Let client number i have the first ranks[i mod len(ranks)] rows of A and columns of B; all have all if empty.

    A client gets the model without the others, and its update does not change them: changes are padded with zeros (Cho
    et al. 2024, arXiv:2401.06432, HetLoRA).
    """
    if not ranks:
        return None

    def mask(spec: ParamSpec, client: int) -> Tensor:
        mask_D, rank = torch.ones(spec.num_trainable, dtype=spec.dtype), ranks[client % len(ranks)]
        for name, values in spec.without_buffers.views(mask_D).items():
            which = FACTOR.search(name)
            if which is not None:
                (values if which[1] == "A" else values.T)[rank:] = 0
        return mask_D

    return mask


def pairs_of(spec: ParamSpec) -> list[Pair]:
    """Return the pairs of factors that travel."""
    slots = {slot.name: slot for slot in spec.slots}
    found = [(FACTOR.search(slot.name), slot) for slot in spec.trainable]
    pairs = []
    for match, slot in found:
        if match is not None and match[1] == "A":
            layer = slot.name[: match.start()]
            other = slots[slot.name[: match.start()] + match[0].replace("lora_A", "lora_B") + slot.name[match.end() :]]
            pairs.append(Pair(slot, other, slots.get(f"{layer}.base_layer.{REST}".lstrip("."))))
    return pairs


def fresh_factors(spec: ParamSpec, params_D: Tensor, rng: np.random.Generator) -> Tensor:
    """Return parameters whose adapters begin anew: A is uniform in +-1 / sqrt(I), as at first, and B is 0."""
    fresh_D = params_D.clone()
    views = spec.without_buffers.views(fresh_D)
    for pair in pairs_of(spec):
        drawn = rng.uniform(-1, 1, pair.a.shape) / pair.a.shape[1] ** 0.5
        views[pair.a.name].copy_(torch.from_numpy(drawn))
        views[pair.b.name].zero_()
    return fresh_D


def rest_beside(params_D: Tensor, held_H: Tensor, aggregate: Aggregate, new_D: Tensor, task: ServerTask) -> Tensor:
    """Return what the server must hold so that layers move by the mean change of the clients' products.

    P' = P + B A + lr (sum_i p_i B_i A_i - B A) - B' A' for new factors A', B', whatever these are. In float64 up to the
    last rounding.
    """
    assert aggregate.updates is not None
    model_M = torch.cat([params_D, held_H.new_zeros(task.spec.num_statistics), held_H])
    for pair, moved in _moved(task.spec, model_M.clone(), aggregate.updates, task.lr):
        assert pair.rest is not None
        _values(pair.rest, model_M).copy_(moved.old + moved.change - _product(pair, new_D))
    return model_M[-len(held_H) :]


def aggregation_error(before_M: Tensor, after_M: Tensor, aggregate: Aggregate, task: ServerTask) -> dict[str, float]:
    """Return how far layers moved from where the mean of the clients' products lies, as a share of its change."""
    assert aggregate.updates is not None
    missed = wanted = 0.0
    for pair, moved in _moved(task.spec, before_M, aggregate.updates, task.lr):
        new = _product(pair, after_M) + _rest(pair, after_M)
        missed += float((new - moved.old - moved.change).square().sum())
        wanted += float(moved.change.square().sum())
    return {"aggregation_error": (missed / wanted) ** 0.5 if wanted else 0.0}


class _Moved(NamedTuple):
    old: Tensor
    """P + B A, (O, I)"""
    change: Tensor
    """lr (sum_i p_i B_i A_i - B A), (O, I)"""


def _moved(spec: ParamSpec, model_M: Tensor, updates: Update, lr: float) -> Iterator[tuple[Pair, _Moved]]:
    """Yield where each adapted layer is, and by how much the mean of the clients' products moves it."""
    share_C = updates.weight.double() / updates.weight.double().sum()
    for pair in pairs_of(spec):
        a_RI, b_OR = (_values(slot, model_M).double() for slot in (pair.a, pair.b))
        a_CRI, b_COR = (_values(slot, updates.delta_D).double() for slot in (pair.a, pair.b))
        a_CRI, b_COR = a_RI + a_CRI, (b_OR + b_COR) * share_C[:, None, None]
        mean_OI = b_COR.transpose(0, 1).flatten(1) @ a_CRI.flatten(0, 1)  # factors of all clients, stacked
        product_OI = b_OR @ a_RI
        yield pair, _Moved(product_OI + _rest(pair, model_M), lr * (mean_OI - product_OI))


def _product(pair: Pair, params: Tensor) -> Tensor:
    return _values(pair.b, params).double() @ _values(pair.a, params).double()


def _rest(pair: Pair, model_M: Tensor) -> Tensor:
    return model_M.new_zeros(()).double() if pair.rest is None else _values(pair.rest, model_M).double()


def _values(slot: Slot, vector: Tensor) -> Tensor:
    return vector.narrow(-1, slot.offset, slot.size).view(*vector.shape[:-1], *slot.shape)
