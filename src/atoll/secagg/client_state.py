"""State of a client in a session, its transition table, and its minimum requirements."""

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
    """Phase of a client in a session."""

    IDLE = "waiting to be asked"
    ADVERTISED = "waiting for the roster"
    SHARED = "waiting for shares"
    READY = "waiting for its own vector"
    MASKED = "waiting for the survivors"
    CONSENTED = "waiting for the others' consent"
    DONE = "done"
    ABORTED = "aborted"


class Vector(NamedTuple):
    """Event: the driver passes the client's summand, unsigned integers as `encoding.encode` returns them."""

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
"""Mode -> phase -> the event that is accepted and the next phase; any other event aborts."""


class Floors(NamedTuple):
    """Minimum requirements of a client, which no server can lower."""

    mode: Mode = "active"
    """Server behaviour that the protocol must withstand."""
    min_cohort: int = 3
    """Minimum number of clients in the cohort, and of clients with keys."""
    min_survivors: int = 3
    """Minimum number of vectors in the sum."""
    min_threshold: int = 2
    """Minimum number of shares that rebuild a secret."""
    min_colluding: float = 0.0
    """Minimum share of colluding clients that the threshold must withstand, in [0, 1)."""


class Peer(NamedTuple):
    """A neighbour of a client."""

    client: int
    mask_key: bytes
    """Its public key for the common mask."""
    channel: bytes
    """Symmetric key that encrypts shares between the two."""


class ClientState(NamedTuple):
    """State of a client in a session; plain data that `msgspec` writes and reads. It holds secrets."""

    phase: Phase = Phase.IDLE
    model: bytes = b""
    """Hash of the model that the client trains."""
    session: bytes = b""
    config: Config | None = None
    cohort_size: int = 0
    mask_private: bytes = b""
    channel_private: bytes = b""
    own_secret: bytes = b""
    """Secret from which the client's own mask derives."""
    record: bytes = b""
    """The client's advert in the form that others receive."""
    num_clients: int = 0
    """Number of clients in the roster."""
    place: int = 0
    """The client's place in the roster."""
    root: bytes = b""
    """Merkle root of the roster."""
    peers: Mapping[int, Peer] = MappingProxyType({})
    """Neighbours by place in the roster; once shares have arrived, those that sent shares."""
    held: Mapping[int, bytes] = MappingProxyType({})
    """Place of an owner -> two shares: of its own mask, and of its mask key."""
    survivors: bytes = b""
    """The accepted survivor set, one bit for each client of the roster."""


def limit(state: ClientState) -> int:
    """Return the maximum number of bytes of the next message."""
    entry = wire.RECORD.size + wire.HASH * tree.depth(max(state.cohort_size, 2))
    return (
        wire.ENVELOPE_BYTES
        + {
            Phase.IDLE: 8 * wire.MAX_CLIENTS + 1024,
            Phase.ADVERTISED: entry * (state.cohort_size + 1),
            Phase.SHARED: (wire.SEALED + 1) * len(state.peers),
            Phase.MASKED: state.num_clients,
            Phase.CONSENTED: (wire.SIGNATURE + 1) * state.num_clients,
        }[state.phase]
    )


def config_of(state: ClientState) -> Config:
    """Return the configuration of the accepted invitation."""
    assert state.config is not None, "a session has a configuration from the invitation on"
    return state.config


def parameters_of(state: ClientState) -> Parameters:
    """Compute degree and threshold, which a client never takes from the server."""
    config = config_of(state)
    try:
        return parameters(state.num_clients, config.dropouts, config.colluding, config.mode)
    except PlanError as error:
        raise Abort(Reason.SMALL_COHORT, str(error)) from error


def graph_of(state: ClientState) -> Graph:
    """Return the graph of neighbours."""
    return graph(parameters_of(state), state.session, state.root)
