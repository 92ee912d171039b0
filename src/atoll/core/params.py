"""A model's state <-> one flat vector.

Shapes: M values of a model, D of them trainable parameters, S = M - D statistics. The vector holds the trainable
parameters first and then, if buffers are averaged, the floating-point buffers (the running statistics of batch norm).
Frozen parameters and integer buffers never travel.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError


class Slot(NamedTuple):
    """Where one named tensor lives in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class ParamSpec(NamedTuple):
    """The layout of the flat vector: names, shapes, and how many of its entries are trained."""

    slots: tuple[Slot, ...]
    num_trainable: int
    dtype: torch.dtype

    @property
    def num_params(self) -> int:
        """The length of the flat vector."""
        return sum(slot.size for slot in self.slots)

    @property
    def without_buffers(self) -> ParamSpec:
        """The layout of the trainable parameters alone, which is that of an update's vector."""
        return self._replace(slots=self.trainable) if self.buffers else self

    @property
    def trainable(self) -> tuple[Slot, ...]:
        """The slots that the optimiser moves."""
        return tuple(slot for slot in self.slots if slot.offset < self.num_trainable)

    @property
    def buffers(self) -> tuple[Slot, ...]:
        """The slots that the forward pass moves."""
        return tuple(slot for slot in self.slots if slot.offset >= self.num_trainable)

    def views(self, params_D: Tensor) -> dict[str, Tensor]:
        """Show the vector as named tensors without copying; leading dimensions (clients) are kept."""
        lead = params_D.shape[:-1]
        return {
            slot.name: params_D.narrow(-1, slot.offset, slot.size).view((*lead, *slot.shape)) for slot in self.slots
        }

    def buffer_views(self, statistics_S: Tensor) -> dict[str, Tensor]:
        """Show the averaged buffers alone, which follow the parameters in the vector, as named tensors."""
        moved = [slot._replace(offset=slot.offset - self.num_trainable) for slot in self.buffers]
        return self._replace(slots=tuple(moved)).views(statistics_S)


def spec_of(model: nn.Module, *, buffers: str = "average") -> ParamSpec:
    """Lay out a model's trainable parameters and, if they are averaged, its floating-point buffers.

    `buffers="local"` leaves the buffers out: batch-norm statistics then never leave a client.
    """
    trained = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not trained:
        raise PlanError(
            f"{type(model).__name__} has no trainable parameters: set requires_grad on what should be trained"
        )
    moved = float_buffers(model) if buffers == "average" else []
    slots: list[Slot] = []
    offset = 0
    for name, tensor in [*trained, *moved]:
        slots.append(Slot(name, tuple(tensor.shape), offset, tensor.numel()))
        offset += tensor.numel()
    double = all(tensor.dtype == torch.float64 for _, tensor in trained)
    dtype = torch.float64 if double else torch.float32
    return ParamSpec(tuple(slots), sum(tensor.numel() for _, tensor in trained), dtype)


def float_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that can be averaged: persistent and floating-point."""
    persistent = model.state_dict().keys()
    return [(n, b) for n, b in model.named_buffers() if b.dtype.is_floating_point and n in persistent]


def flatten(model: nn.Module, spec: ParamSpec) -> Tensor:
    """Copy a model's state into a new flat vector."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return torch.cat([tensors[slot.name].detach().reshape(-1).to(spec.dtype) for slot in spec.slots])


def load(model: nn.Module, spec: ParamSpec, params_D: Tensor) -> nn.Module:
    """Copy a flat vector back into a model, each tensor in its own dtype, and return the model."""
    if params_D.shape != (spec.num_params,):
        raise PlanError(f"the model has {spec.num_params} parameters but the vector has shape {tuple(params_D.shape)}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in spec.views(params_D).items():
            tensors[name].copy_(value)
    return model


def params_hash(params_D: Tensor) -> bytes:
    """Return the SHA-256 of parameters as they lie in memory, which names them in ledgers and secure sums."""
    return hashlib.sha256(params_D.contiguous().numpy().data).digest()
