"""Serialisation of states, so that a session survives the process that runs it. A client's state is secret."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.secagg.client_state import ClientState
from atoll.secagg.server import ServerState

S = TypeVar("S", ClientState, ServerState)


def dump(state: ClientState | ServerState) -> bytes:
    """Serialise a state."""
    return msgspec.msgpack.encode(state, enc_hook=dict)


def load(data: bytes, kind: type[S]) -> S:
    """Deserialise a state that `dump` wrote."""
    return msgspec.msgpack.decode(data, type=kind)
