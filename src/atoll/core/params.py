"""A model's state <-> flat vectors: one that travels, and one that a client keeps.

Shapes: M values of a model that travel, D of them trainable parameters, S = M - D statistics, K kept parameters. The
vector that travels holds the shared parameters first and then, if buffers are averaged, the floating-point buffers (the
running statistics of batch norm). Last come H values of buffers that the server alone moves: they travel down only.
Frozen parameters and integer buffers never travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that normalise."""


class Slot(NamedTuple):
    """Where one named tensor lives in its flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class ParamSpec(NamedTuple):
    """The layout of the vector that travels: names, shapes, how many of its entries are trained; and what is kept."""

    slots: tuple[Slot, ...]
    num_trainable: int
    dtype: torch.dtype
    kept: tuple[Slot, ...] = ()
    """Parameters that each client trains and keeps; they have a flat vector of their own."""
    num_held: int = 0
    """How many values at the end of the vector the server alone moves."""

    @property
    def num_params(self) -> int:
        """The length of the flat vector."""
        return sum(slot.size for slot in self.slots)

    @property
    def without_buffers(self) -> ParamSpec:
        """The layout of the trainable parameters alone, which is that of an update's vector."""
        return self._replace(slots=self.trainable, num_held=0) if self.buffers else self

    @property
    def trainable(self) -> tuple[Slot, ...]:
        """The slots that the optimiser moves."""
        return tuple(slot for slot in self.slots if slot.offset < self.num_trainable)

    @property
    def trained(self) -> tuple[Slot, ...]:
        """The slots that a client's optimiser moves: those that it shares, then those that it keeps."""
        return (*self.trainable, *self.kept)

    @property
    def buffers(self) -> tuple[Slot, ...]:
        """The slots that no optimiser moves: statistics, then what the server holds."""
        return tuple(slot for slot in self.slots if slot.offset >= self.num_trainable)

    @property
    def held(self) -> tuple[Slot, ...]:
        """The slots that the server alone moves."""
        first = self.num_params - self.num_held
        return tuple(slot for slot in self.slots if slot.offset >= first) if self.num_held else ()

    @property
    def num_statistics(self) -> int:
        """The number of values that the forward pass moves."""
        return self.num_params - self.num_trainable - self.num_held

    def views(self, params_D: Tensor) -> dict[str, Tensor]:
        """Show the vector as named tensors without copying; leading dimensions (clients) are kept."""
        return _views(self.slots, params_D)

    def kept_views(self, kept_K: Tensor) -> dict[str, Tensor]:
        """Show the vector of kept parameters as named tensors without copying."""
        return _views(self.kept, kept_K)

    def buffer_views(self, statistics_S: Tensor) -> dict[str, Tensor]:
        """Show the averaged buffers alone, which follow the parameters in the vector, as named tensors."""
        moved = [slot._replace(offset=slot.offset - self.num_trainable) for slot in self.buffers]
        return self._replace(slots=tuple(moved)).views(statistics_S)


def params_hash(params_D: Tensor) -> bytes:
    """Return the SHA-256 of parameters as they lie in memory, which names them."""
    return hashlib.sha256(params_D.contiguous().numpy().data).digest()


def _views(slots: Iterable[Slot], vector: Tensor) -> dict[str, Tensor]:
    lead = vector.shape[:-1]
    return {slot.name: vector.narrow(-1, slot.offset, slot.size).view((*lead, *slot.shape)) for slot in slots}


def spec_of(model: nn.Module, *, buffers: str = "average", keep: Collection[str] = ()) -> ParamSpec:
    """Lay out a model's trainable parameters and, if they are averaged, its floating-point buffers.

    `buffers="local"` leaves the buffers out: batch-norm statistics then never leave a client. `keep` names parameters
    and buffers that do not either.
    """
    trained = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not trained:
        raise PlanError(
            f"{type(model).__name__} has no trainable parameters: set requires_grad on what should be trained"
        )
    shared = [(name, tensor) for name, tensor in trained if name not in keep]
    kept = [(name, tensor) for name, tensor in trained if name in keep]
    moved = [each for each in float_buffers(model) if each[0] not in keep] if buffers == "average" else []
    held = held_buffers(model)
    double = all(tensor.dtype == torch.float64 for _, tensor in trained)
    dtype = torch.float64 if double else torch.float32
    num_trainable = sum(tensor.numel() for _, tensor in shared)
    num_held = sum(tensor.numel() for _, tensor in held)
    return ParamSpec(tuple(_slots([*shared, *moved, *held])), num_trainable, dtype, tuple(_slots(kept)), num_held)


def _slots(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Slot]:
    offset = 0
    for name, tensor in tensors:
        yield Slot(name, tuple(tensor.shape), offset, tensor.numel())
        offset += tensor.numel()


def kept_names(model: nn.Module, *, share: Sequence[str] | None, keep: Sequence[str] | None) -> frozenset[str]:
    """Return the names of the parameters and buffers that clients keep, by patterns such as "head.*".

    `share` names all that travels, `keep` all that does not; "norms" stands for all of the layers that normalise,
    "head" for the last layer, "body" for all before it.
    """
    trained = {id(tensor): name for name, tensor in model.named_parameters() if tensor.requires_grad}
    names: dict[str, set[str]] = {name: {name} for name in [*trained.values(), *(n for n, _ in float_buffers(model))]}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in trained:
            names[trained[id(tensor)]].add(name)  # tied weights have several names
    if keep is not None:
        kept = _matched(model, "keep", keep, names)
    else:
        kept = set() if share is None else names.keys() - _matched(model, "share", share, names)
    if trained and kept >= set(trained.values()):
        raise PlanError(
            f"clients would keep all {len(trained)} parameters of {type(model).__name__}, and nothing would travel: "
            "share at least one, or use a model of several layers"
        )
    return frozenset(kept)


def _matched(model: nn.Module, key: str, patterns: Sequence[str], names: Mapping[str, set[str]]) -> set[str]:
    """Return the names that patterns pick; each must pick at least one."""
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in LAYERS:
            picked = LAYERS[pattern](model, names)
        else:
            picked = {name for name, aliases in names.items() if any(fnmatchcase(each, pattern) for each in aliases)}
        if not picked:
            shown = ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")
            raise PlanError(f"{key}: '{pattern}' matches nothing of the model: leave it out, or name some of {shown}")
        matched |= picked
    return matched


def _norms(model: nn.Module, names: Collection[str]) -> set[str]:
    return {name for name in names if isinstance(model.get_submodule(name.rpartition(".")[0]), NORMS)}


def _head(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names of the last layer: the module of the last trained parameter, in the model's own order."""
    last = [name for name, tensor in model.named_parameters() if tensor.requires_grad][-1:]
    layer = "".join(last).rpartition(".")[0]
    return {name for name in names if name.rpartition(".")[0] == layer}


LAYERS: dict[str, Callable[[nn.Module, Collection[str]], set[str]]] = {
    "norms": _norms,
    "head": _head,
    "body": lambda model, names: set(names) - _head(model, names),
}
"""Words that stand for layers where patterns of names are given."""


def float_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that can be averaged: persistent, floating-point, and not the server's alone."""
    apart = model.state_dict().keys() - {name for name, _ in held_buffers(model)}
    return [(n, b) for n, b in model.named_buffers() if b.dtype.is_floating_point and n in apart]


def held_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that the server alone moves: those that a module names in its attribute `held_buffers`."""
    owners = [(prefix, module) for prefix, module in model.named_modules() if getattr(module, "held_buffers", ())]
    names = [
        (f"{prefix}.{name}".lstrip("."), module, name) for prefix, module in owners for name in module.held_buffers
    ]
    return [(full, module.get_buffer(name)) for full, module, name in names]


def flatten(model: nn.Module, spec: ParamSpec) -> Tensor:
    """Copy what travels of a model's state into a new flat vector."""
    return _joined(model, spec, spec.slots)


def flatten_kept(model: nn.Module, spec: ParamSpec) -> Tensor:
    """Copy the parameters that a client keeps into a new flat vector."""
    return _joined(model, spec, spec.kept)


def _joined(model: nn.Module, spec: ParamSpec, slots: Sequence[Slot]) -> Tensor:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts = [tensors[slot.name].detach().reshape(-1).to(spec.dtype) for slot in slots]
    return torch.cat(parts) if parts else torch.empty(0, dtype=spec.dtype)


def load(model: nn.Module, spec: ParamSpec, params_D: Tensor, kept_K: Tensor | None = None) -> nn.Module:
    """Copy flat vectors back into a model, each tensor in its own dtype, and return the model."""
    if params_D.shape != (spec.num_params,):
        raise PlanError(f"the model has {spec.num_params} parameters but the vector has shape {tuple(params_D.shape)}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in {**spec.views(params_D), **({} if kept_K is None else spec.kept_views(kept_K))}.items():
            tensors[name].copy_(value)
    return model
