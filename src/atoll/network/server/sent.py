"""What clients are sent of a version: all of the broadcast, or the layers that they have where the model is cut.

Where parties hold columns each has layers of its own, which no other gets: a version is then named by the list of the
names of all parties' layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atoll.core.messages import Broadcast, Payload
from atoll.core.wire import pieces
from atoll.network.protocol.layers import index_of
from atoll.network.protocol.messages import Ref
from atoll.network.protocol.objects import manifest_of
from atoll.network.server.parts import ServerParts
from atoll.split.columns import VerticalParties


class Model(NamedTuple):
    """The objects of a version that clients may download."""

    ref: Ref
    """The broadcast itself, which the ledger names."""
    encoded: Ref | None = None
    """The same through the downlink's chain, where that does not send differences."""

    def names(self) -> set[str]:
        """Return the names of its objects."""
        return {self.ref.name} if self.encoded is None else {self.ref.name, self.encoded.name}


class FinalModel(NamedTuple):
    """The objects of the model that a run ended with."""

    shared: Ref | None
    """What all clients take home."""
    own: tuple[Ref, ...] = ()
    """Or what each party does, by its number."""
    layers: Ref | None = None
    """And the list of its names."""

    def of(self, client: int) -> Ref | None:
        """Return what a client takes home; None if there is nothing for it."""
        return self.own[client] if 0 <= client < len(self.own) else self.shared

    def readable(self, client: int) -> set[str]:
        """Return the names of the objects that a client may read."""
        return {ref.name for ref in (self.of(client), self.layers) if ref is not None}

    def names(self) -> set[str]:
        """Return the names of all objects."""
        return {ref.name for ref in (self.shared, self.layers, *self.own) if ref is not None}


def parts_hold_columns(parts: ServerParts) -> bool:
    """Return whether parties hold different columns, and so have layers of their own."""
    return isinstance(parts.parties, VerticalParties)


def for_clients(parts: ServerParts, sent: Broadcast) -> Payload:
    """Return what travels of a broadcast."""
    return sent.plain() if parts.parties is None else _named(parts, parts.job.model_of(sent))


def final_model_of(parts: ServerParts, model_M: Tensor, store: Callable[[Payload], Ref]) -> FinalModel:
    """Store what clients take home of a model at its end."""
    if parts.parties is None:
        return FinalModel(store(Payload(model_M)))
    index, layers = store(_named(parts, model_M)), _layers(parts, model_M)
    return FinalModel(None, tuple(map(store, layers)), index) if parts_hold_columns(parts) else FinalModel(index)


def layers_name(parts: ServerParts, model_M: Tensor) -> str:
    """Return the name of the object that names a model at its end."""
    return manifest_of(*pieces(_named(parts, model_M))).name()


def _named(parts: ServerParts, model_M: Tensor) -> Payload:
    """Return the clients' layers, or the list of the names of those of each party."""
    layers = _layers(parts, model_M)
    return index_of(layers) if parts_hold_columns(parts) else layers[0]


def _layers(parts: ServerParts, model_M: Tensor) -> list[Payload]:
    """Return the layers of each party, or those that all clients have."""
    parties = parts.parties
    assert parties is not None
    numbers = range(len(parties.holders)) if isinstance(parties, VerticalParties) else [0]
    return [Payload(parties.of(number).cut.client.take(model_M)) for number in numbers]
