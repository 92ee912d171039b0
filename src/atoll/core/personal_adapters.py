"""A personal adapter beside the shared one, and a learnt weight that mixes them. Shapes: R rank, I inputs, O outputs.

A layer gives W x + (1 - w) s B A x + w s' B' A' x with w = sigmoid(gate): A and B are averaged, and each client keeps
A', B' and gate. So clients whose tasks differ share what helps all of them, and each learns how much of it it uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.adapters import adapted_layers, factor, factor_layer

PERSONAL = "personal"
KEEP = f"*.{PERSONAL}.*"
"""Pattern, for `keep` of a plan, of all that belongs to personal adapters."""


class Personal(nn.Module):
    """The factors of a client's own adapter, and the gate between it and the shared one; B is 0 at first."""

    def __init__(self, rank: int, like_A: Tensor, like_B: Tensor) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": False, "dtype": like_A.dtype, "device": like_A.device}
        self.A = nn.Linear(like_A.shape[1], rank, **kind)
        self.B = nn.Linear(rank, like_B.shape[0], **kind)
        nn.init.zeros_(self.B.weight)
        self.gate = nn.Parameter(like_A.new_zeros(()))

    def weight(self) -> Tensor:
        """Return the weight of the personal adapter, in (0, 1); 0.5 at first."""
        return torch.sigmoid(self.gate)


class WithPersonal(nn.Module):
    """A frozen layer W with a personal adapter beside it: W x + w s' B' A' x."""

    def __init__(self, base_layer: nn.Module, personal: Personal, scaling: float) -> None:
        super().__init__()
        self.base_layer, self.personal, self.scaling = base_layer, personal, scaling

    def forward(self, x: Tensor) -> Tensor:
        """Return what both give together."""
        output: Tensor = self.base_layer(x)
        own: Tensor = self.personal.B(self.personal.A(x.to(self.personal.gate.dtype)))
        return output + (self.personal.weight() * self.scaling * own).to(output.dtype)

    def mixed(self, product_OI: Tensor, scaling: float) -> Tensor:
        """Return both adapters as one product, times `scaling` as the shared one, B A, is; in float64."""
        own, weight = self.personal, self.personal.weight().detach().double()
        own_OI = own.B.weight.detach().double() @ own.A.weight.detach().double()
        return (1 - weight) * product_OI + weight * (self.scaling / scaling) * own_OI


class SharedPart:
    """Hook that scales what the shared adapter gives by 1 - w; a copy of the model gets one of its own."""

    def __init__(self, personal: Personal) -> None:
        self.personal = personal

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output times what the personal adapter leaves."""
        return (1 - self.personal.weight()) * output


def add_personal(model: nn.Module, rank: int, alpha: float) -> None:
    """Put a personal adapter of a rank, times alpha / rank, beside every layer that has a shared one."""
    for layer in adapted_layers(model, "model.personal_rank").values():
        personal = Personal(rank, factor(layer, "A"), factor(layer, "B"))
        assert isinstance(layer.base_layer, nn.Module)
        layer.base_layer = WithPersonal(layer.base_layer, personal, alpha / rank)
        factor_layer(layer, "B").register_forward_hook(SharedPart(personal))


def mixing_weights(model: nn.Module) -> dict[str, float]:
    """Return the weight of the personal adapter in each layer of a client's model, 1 minus that of the shared one."""
    owners = [(name, module) for name, module in model.named_modules() if isinstance(module, Personal)]
    return {name.removesuffix(f".base_layer.{PERSONAL}"): float(module.weight().detach()) for name, module in owners}
