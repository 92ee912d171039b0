"""The server's side of one session: `handle(state, event) -> (state, messages for clients)`, without I/O.

An invalid message raises Abort with the unchanged state, and the session continues without it. If too few clients are
left, Abort carries an empty final state. Vectors are added as they arrive and never kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import PlanError
from atoll.secagg import tree, wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.encoding import check_sum
from atoll.secagg.graph import Graph, Parameters, graph, parameters
from atoll.secagg.shamir import SHARE
from atoll.secagg.unmask import Revealed, unmask
from atoll.secagg.wire import (
    Advert,
    Consent,
    Consents,
    Invite,
    Mailbox,
    Masked,
    Mode,
    Reveal,
    Roster,
    Shares,
    Survivors,
)


class Phase(StrEnum):
    """Phase of the server in a session."""

    ADVERTISE = "collecting keys"
    SHARE = "collecting shares"
    INPUT = "collecting vectors"
    CONSENT = "collecting consents"
    UNMASK = "collecting what opens the sum"
    DONE = "done"
    ABORTED = "aborted"


class Close(NamedTuple):
    """Event: the driver ends this phase, with the messages that have arrived."""

    phase: Phase


NEXT: dict[Mode, dict[Phase, tuple[type, Phase]]] = {
    "curious": {
        Phase.ADVERTISE: (Advert, Phase.SHARE),
        Phase.SHARE: (Shares, Phase.INPUT),
        Phase.INPUT: (Masked, Phase.UNMASK),
        Phase.UNMASK: (Reveal, Phase.DONE),
    },
    "active": {
        Phase.ADVERTISE: (Advert, Phase.SHARE),
        Phase.SHARE: (Shares, Phase.INPUT),
        Phase.INPUT: (Masked, Phase.CONSENT),
        Phase.CONSENT: (Consent, Phase.UNMASK),
        Phase.UNMASK: (Reveal, Phase.DONE),
    },
}
"""Mode -> phase -> the message that is accepted from clients, and the next phase after Close."""

NOTHING: Mapping[int, bytes] = MappingProxyType({})


class ServerState(NamedTuple):
    """State of the server in a session; plain data that `msgspec` writes and reads."""

    phase: Phase
    session: bytes
    invite: Invite
    adverts: Mapping[int, bytes] = NOTHING
    """Client -> its advert as a record."""
    roster: tuple[int, ...] = ()
    """Clients with keys, ascending. The maps below identify a client by its place in the roster."""
    root: bytes = b""
    """Merkle root of the adverts."""
    shares: Mapping[int, bytes] = NOTHING
    """Sealed shares by sender."""
    total: bytes = b""
    """The sum of the masked vectors."""
    inputs: frozenset[int] = frozenset()
    """Clients whose vectors are in the sum."""
    consents: Mapping[int, bytes] = NOTHING
    """Signatures on the survivor set."""
    reveals: Mapping[int, bytes] = NOTHING
    """Revealed shares by sender."""
    result: bytes = b""
    """The unmasked sum, once the session is done."""


class Out(NamedTuple):
    """A message to a client."""

    client: int
    data: bytes


Step = tuple[ServerState, Iterable[Out]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server's settings that hold for all sessions: its own key, and the keys of all clients."""

    identity: Ed25519PrivateKey
    registry: Mapping[int, bytes]
    """Client -> its Ed25519 public key."""

    def open(self, invite: Invite) -> Step:
        """Begin a session and ask its cohort for keys; raise PlanError for an impossible configuration."""
        clients, config = wire.read_cohort(invite), invite.config
        check_sum(config.encoding, len(clients))
        parameters(len(clients), config.dropouts, config.colluding, config.mode)
        unknown = [client for client in clients if client not in self.registry]
        if unknown:
            raise PlanError(f"{len(unknown)} clients have no identity key, such as {unknown[0]}: register them first")
        state = ServerState(Phase.ADVERTISE, wire.session_id(invite), invite)
        return state, self._to_all(state, clients, invite)

    def handle(self, state: ServerState, event: bytes | Close) -> Step:
        """Process a client's message, or close a phase; messages to clients are created lazily, by iteration."""
        table = NEXT[state.invite.config.mode]
        if state.phase not in table:
            raise Abort(Reason.UNEXPECTED, f"this session is {state.phase}; open a new one", state)
        expected, next_phase = table[state.phase]
        if isinstance(event, Close):
            if event.phase is not state.phase:
                raise Abort(
                    Reason.UNEXPECTED,
                    f"cannot close {event.phase} while {state.phase}; close the current phase",
                    state,
                )
            try:
                return self._close(state._replace(phase=next_phase), event.phase)
            except Abort as abort:
                abort.state = ServerState(Phase.ABORTED, state.session, state.invite)
                raise
        try:
            return self._accept(state, event, expected), ()
        except Abort as abort:
            abort.state = state
            raise

    def awaited(self, state: ServerState) -> frozenset[int]:
        """Return the clients whose message of this phase is missing; when there are none, close the phase."""
        match state.phase:
            case Phase.ADVERTISE:
                return frozenset(wire.read_cohort(state.invite)).difference(state.adverts)
            case Phase.SHARE:
                left = set(range(len(state.roster))).difference(state.shares)
            case Phase.INPUT:
                left = set(state.shares).difference(state.inputs)
            case Phase.CONSENT:
                left = set(state.inputs).difference(state.consents)
            case Phase.UNMASK:
                left = set(state.consents if state.invite.config.mode == "active" else state.inputs)
                left = left.difference(state.reveals)
            case _:
                left = set()
        return frozenset(state.roster[index] for index in left)

    def survivors(self, state: ServerState) -> tuple[int, ...]:
        """Return the clients whose vectors are in the sum."""
        return tuple(state.roster[index] for index in sorted(state.inputs))

    def result(self, state: ServerState) -> np.ndarray:
        """Return the sum of the survivors' vectors, once the session is done."""
        if state.phase is not Phase.DONE:
            raise Abort(
                Reason.UNEXPECTED, f"there is no sum while {state.phase}; continue until the session is done", state
            )
        return np.frombuffer(state.result, state.invite.config.dtype)

    def _accept(self, state: ServerState, data: bytes, expected: type) -> ServerState:
        """Return the state with one client's message, if it is expected, signed and well formed."""
        envelope = wire.read_envelope(data, _limit(state))
        if envelope.session != state.session:
            raise Abort(Reason.WRONG_SESSION, f"client {envelope.sender} sent a message of another session; ignore it")
        index = self._index(state, envelope.sender)
        if not wire.signed_by(self.registry[envelope.sender], envelope):
            raise Abort(Reason.BAD_SIGNATURE, f"client {envelope.sender} did not sign the message; ignore it")
        body: wire.AnyMessage = wire.read_body(envelope, expected)
        match body:
            case Advert():
                record = wire.record(index, body, envelope.signature)
                return state._replace(adverts={**state.adverts, index: record})
            case Shares():
                _check_length(envelope.sender, body.sealed, wire.SEALED * _parameters(state).degree)
                return state._replace(shares={**state.shares, index: body.sealed})
            case Masked():
                return _add(state, index, body)
            case Consent():
                if body.digest != self._digest(state):
                    raise Abort(Reason.INCONSISTENT, f"client {envelope.sender} signed other survivors; exclude it")
                return state._replace(consents={**state.consents, index: envelope.signature})
            case Reveal():
                owners = _graph(state).holders(index).tolist()
                _check_length(envelope.sender, body.shares, SHARE * sum(u in state.shares for u in owners))
                return state._replace(reveals={**state.reveals, index: body.shares})
        raise AssertionError(f"{expected} is in the table, but has no handler")

    def _index(self, state: ServerState, client: int) -> int:
        """Return the key of a client in this phase's map: its number for adverts, later its place in the roster."""
        if state.phase is Phase.ADVERTISE:
            index, expected, done = client, _invited(state.invite, client), client in state.adverts
        else:
            index = _place(state.roster, client)
            consenting = state.consents if state.invite.config.mode == "active" else state.inputs
            expected, done = {
                Phase.SHARE: (index >= 0, index in state.shares),
                Phase.INPUT: (index in state.shares, index in state.inputs),
                Phase.CONSENT: (index in state.inputs, index in state.consents),
                Phase.UNMASK: (index in consenting, index in state.reveals),
            }[state.phase]
        if not expected:
            raise Abort(Reason.UNKNOWN_SENDER, f"client {client} takes no part in {state.phase}; ignore it")
        if done:
            raise Abort(
                Reason.DUPLICATE, f"client {client} sent two messages while {state.phase}; the first one counts"
            )
        return index

    def _close(self, state: ServerState, phase: Phase) -> Step:
        """End a phase and return the messages of the next one, in which `state` already is."""
        match phase:
            case Phase.ADVERTISE:
                state = state._replace(roster=tuple(sorted(state.adverts)))
                levels = tree.build([state.adverts[client] for client in state.roster] or [b""])
                state = state._replace(root=tree.root(levels, len(state.roster)))
                _require(len(state.roster), _parameters(state).min_survivors)
                return state, self._rosters(state, levels)
            case Phase.SHARE:
                _require(len(state.shares), _parameters(state).min_survivors)
                return state._replace(total=bytes(state.invite.config.num_bytes)), self._mailboxes(state)
            case Phase.INPUT:
                _require(len(state.inputs), _parameters(state).min_survivors)
                return state, self._to_all(state, self.survivors(state), Survivors(_survivor_bits(state)))
            case Phase.CONSENT:
                _require(len(state.consents), _parameters(state).threshold)
                return state, self._consents(state)
            case Phase.UNMASK:
                return _open(state), ()
        raise AssertionError(f"{phase} is in the table, but cannot be closed")

    def _rosters(self, state: ServerState, levels: list[list[bytes]]) -> Iterator[Out]:
        """Yield each client's view of the roster: its neighbours' adverts, with proofs under the common root."""
        table = _graph(state).table()
        records = [state.adverts[client] for client in state.roster]
        proofs = [tree.proof(levels, index) for index in range(len(state.roster))]
        for index, client in enumerate(state.roster):
            neighbours = table[index].tolist()
            roster = Roster(
                num_clients=len(state.roster),
                index=index,
                root=state.root,
                records=b"".join([records[other] for other in neighbours]),
                proofs=b"".join([proofs[other] for other in (index, *neighbours)]),
            )
            yield self._to(state, client, roster)

    def _mailboxes(self, state: ServerState) -> Iterator[Out]:
        """Yield to each client the shares that its neighbours sealed for it."""
        table, size = _graph(state).table(), wire.SEALED
        shared = _marks(len(state.roster), state.shares)
        for index in sorted(state.shares):
            neighbours = table[index]
            senders = neighbours[shared[neighbours]]
            slots = (table[senders] < index).sum(axis=1)  # place of this client among each sender's neighbours
            sealed = [
                state.shares[sender][size * slot : size * (slot + 1)]
                for sender, slot in zip(senders.tolist(), slots.tolist(), strict=True)
            ]
            yield self._to(state, state.roster[index], Mailbox(wire.pack_bits(shared[neighbours]), b"".join(sealed)))

    def _consents(self, state: ServerState) -> Iterator[Out]:
        """Yield to each client its neighbours' signatures on the survivor set."""
        ring, consented = _graph(state), _marks(len(state.roster), state.consents)
        for index in sorted(state.consents):
            neighbours = ring.neighbours(index)
            signatures = b"".join(state.consents[other] for other in neighbours[consented[neighbours]].tolist())
            yield self._to(state, state.roster[index], Consents(wire.pack_bits(consented[neighbours]), signatures))

    def _digest(self, state: ServerState) -> bytes:
        return wire.survivor_digest(state.session, state.root, _survivor_bits(state))

    def _to(self, state: ServerState, client: int, message: wire.AnyMessage) -> Out:
        return Out(client, wire.encode(wire.sign(self.identity, wire.SERVER, state.session, message)))

    def _to_all(self, state: ServerState, clients: tuple[int, ...], message: wire.AnyMessage) -> list[Out]:
        data = self._to(state, wire.SERVER, message).data
        return [Out(client, data) for client in clients]


def _add(state: ServerState, index: int, masked: Masked) -> ServerState:
    config = state.invite.config
    _check_length(state.roster[index], masked.vector, config.num_bytes)
    total = np.frombuffer(state.total, config.dtype) + np.frombuffer(masked.vector, config.dtype)
    return state._replace(total=total.tobytes(), inputs=state.inputs | {index})


def _open(state: ServerState) -> ServerState:
    """Unmask the sum, and delete everything else from the state."""
    config = state.invite.config
    revealed = Revealed(
        session=state.session,
        graph=_graph(state),
        records=[state.adverts[client] for client in state.roster],
        shared=_marks(len(state.roster), state.shares),
        survived=_marks(len(state.roster), state.inputs),
        reveals=state.reveals,
    )
    total = np.frombuffer(state.total, config.dtype).copy()
    unmask(total, revealed)
    return state._replace(adverts={}, shares={}, consents={}, reveals={}, total=b"", result=total.tobytes())


def _limit(state: ServerState) -> int:
    """Return the maximum number of bytes of a message of this phase."""
    degree = max(len(state.roster) - 1, 0)
    return (
        wire.ENVELOPE_BYTES
        + {
            Phase.ADVERTISE: 0,
            Phase.SHARE: wire.SEALED * degree,
            Phase.INPUT: state.invite.config.num_bytes,
            Phase.CONSENT: 0,
            Phase.UNMASK: SHARE * (degree + 1),
        }[state.phase]
    )


def _invited(invite: Invite, client: int) -> bool:
    cohort = np.frombuffer(invite.cohort, "<u8")
    return client >= 0 and bool(cohort[np.searchsorted(cohort, np.uint64(client)) % cohort.size] == client)


def _place(clients: tuple[int, ...], client: int) -> int:
    """Return the place of a client in an ascending list, or -1."""
    place = bisect_left(clients, client)
    return place if place < len(clients) and clients[place] == client else -1


def _marks(num: int, indices: Iterable[int]) -> np.ndarray:
    marks = np.zeros(num, bool)
    marks[list(indices)] = True
    return marks


def _survivor_bits(state: ServerState) -> bytes:
    return wire.pack_bits(_marks(len(state.roster), state.inputs))


def _check_length(client: int, data: bytes | memoryview, num: int) -> None:
    if len(data) != num:
        raise Abort(Reason.MALFORMED, f"client {client} sent {len(data)} bytes, {num} are expected; exclude the client")


def _require(num: int, least: int) -> None:
    if num < least:
        raise Abort(Reason.TOO_FEW, f"{num} clients are left, {least} are needed; start a new attempt with more")


def _parameters(state: ServerState) -> Parameters:
    config = state.invite.config
    try:
        return parameters(len(state.roster), config.dropouts, config.colluding, config.mode)
    except PlanError as error:
        raise Abort(Reason.TOO_FEW, str(error)) from error


def _graph(state: ServerState) -> Graph:
    return graph(_parameters(state), state.session, state.root)
