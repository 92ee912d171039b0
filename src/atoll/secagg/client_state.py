"""What a client remembers of a session, what it accepts when, and what it insists on."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from atoll.core.errors import PlanError
from atoll.secagg import tree, wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.graph import Graph, Parameters, graph, parameters
from atoll.secagg.wire import Config, Consents, Invite, Mailbox, Mode, Roster, Survivors


class Phase(StrEnum):
    """Where a client stands."""

    IDLE = "waiting to be asked"
    ADVERTISED = "waiting for the roster"
    SHARED = "waiting for shares"
    READY = "waiting for its own vector"
    MASKED = "waiting for the survivors"
    CONSENTED = "waiting for the others' consent"
    DONE = "done"
    ABORTED = "aborted"


class Vector(NamedTuple):
    """The driver gives the client what it has to add to the sum: unsigned integers, as `encoding.encode` makes them."""

    values: np.ndarray


NEXT: dict[Mode, dict[Phase, tuple[type, Phase]]] = {
    "curious": {
        Phase.IDLE: (Invite, Phase.ADVERTISED),
        Phase.ADVERTISED: (Roster, Phase.SHARED),
        Phase.SHARED: (Mailbox, Phase.READY),
        Phase.READY: (Vector, Phase.MASKED),
        Phase.MASKED: (Survivors, Phase.DONE),
    },
    "active": {
        Phase.IDLE: (Invite, Phase.ADVERTISED),
        Phase.ADVERTISED: (Roster, Phase.SHARED),
        Phase.SHARED: (Mailbox, Phase.READY),
        Phase.READY: (Vector, Phase.MASKED),
        Phase.MASKED: (Survivors, Phase.CONSENTED),
        Phase.CONSENTED: (Consents, Phase.DONE),
    },
}
"""What is accepted in each phase, and where it leads; anything else aborts."""


class Floors(NamedTuple):
    """What a client insists on, whatever the server asks for."""

    mode: Mode = "active"
    min_cohort: int = 3
    """Clients in the cohort, and clients with keys."""
    min_survivors: int = 3
    """Vectors in the sum."""
    min_threshold: int = 2
    min_colluding: float = 0.0
    """Share of colluders that the threshold must stand."""


class Peer(NamedTuple):
    """A neighbour."""

    client: int
    mask_key: bytes
    channel: bytes
    """The key that seals shares between the two."""


class ClientState(NamedTuple):
    """All that a client remembers of a session; plain data, so that `msgspec` writes and reads it. Keep it secret."""

    phase: Phase = Phase.IDLE
    model: bytes = b""
    session: bytes = b""
    config: Config | None = None
    cohort_size: int = 0
    mask_private: bytes = b""
    channel_private: bytes = b""
    own_secret: bytes = b""
    """Gives the client's own mask."""
    record: bytes = b""
    """Its advert as others see it."""
    num_clients: int = 0
    place: int = 0
    """The client's place in the roster."""
    root: bytes = b""
    peers: Mapping[int, Peer] = MappingProxyType({})
    """Neighbours by their place in the roster; once shares arrived, those who shared."""
    held: Mapping[int, bytes] = MappingProxyType({})
    """Two shares by their owner's place: of its own mask, and of its mask key."""
    survivors: bytes = b""


def limit(state: ClientState) -> int:
    """The most bytes that the message which is due can have."""
    each = wire.RECORD.size + wire.HASH * tree.depth(max(state.cohort_size, 2))
    return (
        wire.ENVELOPE_BYTES
        + {
            Phase.IDLE: 8 * wire.MAX_CLIENTS + 1024,
            Phase.ADVERTISED: each * (state.cohort_size + 1),
            Phase.SHARED: (wire.SEALED + 1) * len(state.peers),
            Phase.MASKED: state.num_clients,
            Phase.CONSENTED: (wire.SIGNATURE + 1) * state.num_clients,
        }[state.phase]
    )


def config_of(state: ClientState) -> Config:
    """What was agreed on in the invitation."""
    assert state.config is not None, "a session has a configuration from the invitation on"
    return state.config


def parameters_of(state: ClientState) -> Parameters:
    """Degree and threshold, which every client finds for itself."""
    config = config_of(state)
    try:
        return parameters(state.num_clients, config.dropouts, config.colluding, config.mode)
    except PlanError as error:
        raise Abort(Reason.SMALL_COHORT, str(error)) from error


def graph_of(state: ClientState) -> Graph:
    """Who masks with whom."""
    return graph(parameters_of(state), state.session, state.root)
