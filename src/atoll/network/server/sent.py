"""What clients are sent of a version: all of the broadcast, or the layers that they have where the model is cut."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from atoll.core.messages import Broadcast, Payload
from atoll.core.wire import pieces
from atoll.network.protocol.messages import Ref
from atoll.network.protocol.objects import manifest_of
from atoll.network.server.parts import ServerParts


class Model(NamedTuple):
    """The objects of a version that clients may download."""

    ref: Ref
    """The broadcast itself, which the ledger names."""
    encoded: Ref | None = None
    """The same through the downlink's chain, where that does not send differences."""

    def names(self) -> set[str]:
        """Return the names of its objects."""
        return {self.ref.name} if self.encoded is None else {self.ref.name, self.encoded.name}


def for_clients(parts: ServerParts, sent: Broadcast) -> Payload:
    """Return what travels of a broadcast."""
    if parts.parties is None:
        return sent.plain()
    return Payload(part_for_clients(parts, parts.job.model_of(sent)))


def part_for_clients(parts: ServerParts, model_M: Tensor) -> Tensor:
    """Return the values of a model that clients have at its end."""
    return model_M if parts.parties is None else parts.parties.cut.client.take(model_M)


def layers_name(parts: ServerParts, model_M: Tensor) -> str:
    """Return the name of the object that clients are sent of a model at its end."""
    return manifest_of(*pieces(Payload(part_for_clients(parts, model_M)))).name()
