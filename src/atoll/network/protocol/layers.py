"""The layers of parties that hold columns: each has its own, and one object names those of all.

The ledger and orders name that object, so that each party can check that the layers it is sent are those of the
version, and learns nothing of the others' but a hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.errors import RunError
from atoll.core.messages import Payload
from atoll.core.wire import pieces
from atoll.network.protocol.objects import manifest_of

NAME_BYTES = 32
"""Bytes of the name of an object."""


def index_of(layers: Sequence[Payload]) -> Payload:
    """Return the names of the parties' layers, one after another."""
    names = b"".join(bytes.fromhex(manifest_of(*pieces(each)).name()) for each in layers)
    return Payload(torch.frombuffer(bytearray(names), dtype=torch.uint8).view(len(layers), NAME_BYTES))


def name_in(index: Payload, number: int) -> str:
    """Return the name of one party's layers; RunError if there is none.

    >>> index = index_of([Payload(torch.zeros(2)), Payload(torch.ones(2))])
    >>> name_in(index, 1) == manifest_of(*pieces(Payload(torch.ones(2)))).name()
    True
    """
    names = index.carrier
    if names.dtype != torch.uint8 or names.dim() != 2 or names.shape[1] != NAME_BYTES or number >= len(names):
        raise RunError(
            f"the server's list of layers has {tuple(names.shape)} values of {names.dtype}, none of party {number}: "
            "do not trust this server"
        )
    return names[number].numpy().tobytes().hex()
