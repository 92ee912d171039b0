"""States as bytes and back, so that a session outlives the process that runs it. A client's are secret."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.secagg.client_state import ClientState
from atoll.secagg.server import ServerState

S = TypeVar("S", ClientState, ServerState)


def dump(state: ClientState | ServerState) -> bytes:
    """Write a state."""
    return msgspec.msgpack.encode(state, enc_hook=dict)


def load(data: bytes, kind: type[S]) -> S:
    """Read a state that this machine wrote."""
    return msgspec.msgpack.decode(data, type=kind)
