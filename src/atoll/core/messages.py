"""What flows between server and client: frozen, typed, and made of flat vectors.

Shapes: D parameters, C clients, V = D + extra vectors. A stacked Update has a leading C on each of its tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Named tensors that somebody remembers: a server, a client, an optimiser, an aggregator."""


SERVER = -1
"""Who trains on the server's own samples, where a client's number would stand."""


def _packed(first_D: Tensor, aux: State) -> Tensor:
    return torch.cat([first_D, *(aux[name].reshape(-1) for name in sorted(aux))]) if aux else first_D


def _unpacked(vector_V: Tensor, first_D: Tensor, aux: State) -> tuple[Tensor, State]:
    found_D, rest = vector_V[: first_D.numel()], vector_V[first_D.numel() :]
    found: State = {}
    for name in sorted(aux):
        old = aux[name]
        found[name], rest = rest[: old.numel()].view(old.shape), rest[old.numel() :]
    return found_D, found


class Broadcast(NamedTuple):
    """What the server sends down: the parameters and the extra vectors of the algorithm."""

    params_D: Tensor
    aux: State

    def packed(self) -> Tensor:
        """Everything that is sent down as one vector (V,)."""
        return _packed(self.params_D, self.aux)

    def unpacked(self, vector_V: Tensor) -> Broadcast:
        """Undo `packed`; this broadcast gives the layout."""
        return Broadcast(*_unpacked(vector_V, self.params_D, self.aux))


class Task(NamedTuple):
    """One client's order: train from this version. `attempt` counts every time that clients were asked."""

    client: int
    version: int
    attempt: int
    share: float = 1.0
    """What its weight is multiplied by: a sampler that prefers some clients makes up for it here."""
    work: float = 1.0
    """How much of its steps it has time for, in (0, 1]."""
    clip: float | None = None
    """How long its update may be, where privacy changes that from round to round."""


class Update(NamedTuple):
    """What a client sends up: `delta` is new minus old, `weight` its share in a weighted rule."""

    delta_D: Tensor
    weight: Tensor
    aux: State

    def packed(self) -> Tensor:
        """Everything that leaves the client as one vector (V,), so that clipping and masking miss nothing."""
        return _packed(self.delta_D, self.aux)

    def unpacked(self, vector_V: Tensor) -> Update:
        """Undo `packed` after the vector has been through the uplink; this update gives the layout."""
        delta_D, aux = _unpacked(vector_V, self.delta_D, self.aux)
        return Update(delta_D, self.weight, aux)

    def alone(self) -> Update:
        """The stacked update of this client alone, which shares its memory."""
        return Update(self.delta_D[None], self.weight[None], {k: v[None] for k, v in self.aux.items()})

    def rows(self, keep_C: Tensor | int) -> Update:
        """The clients of a stacked update that a boolean mask picks, or the one with this number."""
        return Update(self.delta_D[keep_C], self.weight[keep_C], {k: v[keep_C] for k, v in self.aux.items()})


def stack(updates: list[Update]) -> Update:
    """Put the updates of several clients on top of each other."""
    return Update(
        torch.stack([u.delta_D for u in updates]),
        torch.stack([u.weight for u in updates]),
        {name: torch.stack([u.aux[name] for u in updates]) for name in updates[0].aux},
    )


class Payload(NamedTuple):
    """An encoded update: what the last transform left of the vector, and what each transform needs to undo itself."""

    carrier: Tensor
    sides: tuple[State, ...] = ()


class Aggregate(NamedTuple):
    """What the aggregator made of a cohort."""

    delta_D: Tensor
    aux: State
    weight: float
    num_clients: int
    updates: Update | None = None
    """The cohort's updates, stacked, as they came out of the uplink; None unless the algorithm `needs_updates`."""
