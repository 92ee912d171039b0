"""What flows between server and client: frozen, typed, and made of flat vectors.

Shapes: D parameters, C clients, V = D + extra vectors. A stacked Update has a leading C on each of its tensors.

Extras of two kinds travel beside the parameters. One as long as the parameters is a vector like them (the control
variates of SCAFFOLD) and goes with them through codecs. Any other (FedNova's number of steps, q-FFL's scale) is exact,
and so are the model's statistics: no codec may change them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Named tensors that somebody remembers: a server, a client, an optimiser, an aggregator."""


SERVER = -1
"""Who trains on the server's own samples, where a client's number would stand."""


MEMBERS = "members"
"""Under this name an update says to which of several models it belongs."""
KEPT = "kept"
"""Under this name a client remembers the parameters that it keeps, as one vector."""


STATISTICS = "statistics"
"""The extra that holds the model's averaged buffers: their values in a broadcast, their changes in an update.

In a broadcast the buffers that the server alone moves follow them."""


HELD = "held"
"""Under this name the server's step gets and returns the buffers that the server alone moves, as one vector."""


def _vectors(first_D: Tensor, aux: State) -> State:
    """The extras that are vectors like the parameters."""
    return {k: v for k, v in aux.items() if k != STATISTICS and v.shape == first_D.shape and v.numel() > 1}


def _exact(first_D: Tensor, aux: State) -> State:
    """The extras that no codec may change."""
    return {name: aux[name] for name in aux.keys() - _vectors(first_D, aux).keys()}


def _packed(first_D: Tensor, aux: State) -> Tensor:
    if first_D.is_meta:  # torch.cat would import torch's compiler to join tensors without values, which takes a second
        return first_D.new_empty(first_D.numel() + sum(value.numel() for value in aux.values()))
    return torch.cat([first_D, *(aux[name].reshape(-1) for name in sorted(aux))]) if aux else first_D


def _unpacked(vector_V: Tensor, first_D: Tensor, aux: State) -> tuple[Tensor, State]:
    found_D, rest = vector_V[: first_D.numel()], vector_V[first_D.numel() :]
    found: State = {}
    for name in sorted(aux):
        old = aux[name]
        found[name], rest = rest[: old.numel()].view(old.shape), rest[old.numel() :]
    return found_D, found


class Broadcast(NamedTuple):
    """What the server sends down: the parameters, the extras of the algorithm and the model's statistics."""

    params_D: Tensor
    aux: State

    def vector(self) -> Tensor:
        """Return what codecs may change, as one vector (V,)."""
        return _packed(self.params_D, _vectors(self.params_D, self.aux))

    def exact(self) -> State:
        """Return the extras that travel unchanged."""
        return _exact(self.params_D, self.aux)

    def plain(self) -> Payload:
        """Return what travels where nothing is encoded."""
        return Payload(self.vector()).beside(self.exact())

    def rebuilt(self, vector_V: Tensor, exact: State) -> Broadcast:
        """Undo `vector` and `exact`; this broadcast gives the layout."""
        params_D, vectors = _unpacked(vector_V, self.params_D, _vectors(self.params_D, self.aux))
        return Broadcast(params_D, {**vectors, **exact})


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

    def vector(self) -> Tensor:
        """Return what codecs, clipping and masks may change, as one vector (V,)."""
        return _packed(self.delta_D, _vectors(self.delta_D, self.aux))

    def exact(self) -> State:
        """Return the extras that travel unchanged."""
        return _exact(self.delta_D, self.aux)

    def plain(self) -> Payload:
        """Return what travels where nothing is encoded."""
        return Payload(self.vector()).beside(self.exact())

    def rebuilt(self, vector_V: Tensor, exact: State | None = None) -> Update:
        """Undo `vector` and `exact`; this update gives the layout, and its own exact extras unless others are given."""
        delta_D, vectors = _unpacked(vector_V, self.delta_D, _vectors(self.delta_D, self.aux))
        return Update(delta_D, self.weight, {**vectors, **(self.exact() if exact is None else exact)})

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

    def beside(self, exact: State) -> Payload:
        """Let exact extras travel with this payload, as its last side; none take no space."""
        return self._replace(sides=(*self.sides, exact)) if exact else self

    def split(self, expected: State) -> tuple[Payload, State]:
        """Undo `beside`, for extras of the expected names, shapes and types; ValueError if others came."""
        if not expected:
            return self, {}
        exact = self.sides[-1] if self.sides else {}
        layouts = [{name: (value.shape, value.dtype) for name, value in each.items()} for each in (exact, expected)]
        if layouts[0] != layouts[1]:
            raise ValueError(f"exact extras {layouts[0]} came where {layouts[1]} are due")
        return self._replace(sides=self.sides[:-1]), exact


class Aggregate(NamedTuple):
    """What the aggregator made of a cohort."""

    delta_D: Tensor
    aux: State
    weight: float
    num_clients: int
    updates: Update | None = None
    """The cohort's updates, stacked, as they came out of the uplink; None unless the algorithm `needs_updates`."""
