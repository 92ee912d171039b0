"""The server's side of one session: `handle(state, event) -> (state, messages for clients)`, without I/O.

A message that is not right raises Abort with the state as it was: the session goes on without it. When too few are
left, Abort comes with a state that holds nothing. Vectors are added as they arrive and never kept.
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
from atoll.secagg.unmask import Opened, unmask
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
    """Where the server stands."""

    ADVERTISE = "collecting keys"
    SHARE = "collecting shares"
    INPUT = "collecting vectors"
    CONSENT = "collecting consents"
    UNMASK = "collecting what opens the sum"
    DONE = "done"
    ABORTED = "aborted"


class Close(NamedTuple):
    """The driver waits no longer in this phase."""

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
"""What is accepted from clients in each phase, and where Close leads."""

NOTHING: Mapping[int, bytes] = MappingProxyType({})


class ServerState(NamedTuple):
    """All that the server remembers of a session; plain data, so that `msgspec` writes and reads it."""

    phase: Phase
    session: bytes
    invite: Invite
    adverts: Mapping[int, bytes] = NOTHING
    """Records by client."""
    roster: tuple[int, ...] = ()
    """Clients with keys, ascending. From here on clients go by their place in it."""
    root: bytes = b""
    shares: Mapping[int, bytes] = NOTHING
    total: bytes = b""
    """The sum of the masked vectors."""
    inputs: frozenset[int] = frozenset()
    """Whose vectors are in the sum."""
    consents: Mapping[int, bytes] = NOTHING
    """Signatures."""
    reveals: Mapping[int, bytes] = NOTHING
    result: bytes = b""
    """The sum, once it is open."""


class Out(NamedTuple):
    """A message for a client."""

    client: int
    data: bytes


Step = tuple[ServerState, Iterable[Out]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """What stays the same over sessions: the server's own key, and the keys of all clients."""

    identity: Ed25519PrivateKey
    registry: Mapping[int, bytes]

    def open(self, invite: Invite) -> Step:
        """Begin a session: ask its cohort for keys. A configuration that cannot be right raises PlanError."""
        clients, config = wire.read_cohort(invite), invite.config
        check_sum(config.encoding, len(clients))
        parameters(len(clients), config.dropouts, config.colluding, config.mode)
        unknown = [client for client in clients if client not in self.registry]
        if unknown:
            raise PlanError(f"{len(unknown)} clients have no identity key, such as {unknown[0]}: register them first")
        state = ServerState(Phase.ADVERTISE, wire.session_id(invite), invite)
        return state, self._to_all(state, clients, invite)

    def handle(self, state: ServerState, event: bytes | Close) -> Step:
        """Take a client's message, or close a phase; messages for clients are made while they are iterated over."""
        table = NEXT[state.invite.config.mode]
        if state.phase not in table:
            raise Abort(Reason.UNEXPECTED, f"this session is {state.phase}; open a new one", state)
        expected, after = table[state.phase]
        if isinstance(event, Close):
            if event.phase is not state.phase:
                raise Abort(Reason.UNEXPECTED, f"cannot close {event.phase} while {state.phase}; close that", state)
            try:
                return self._close(state._replace(phase=after), event.phase)
            except Abort as abort:
                abort.state = ServerState(Phase.ABORTED, state.session, state.invite)
                raise
        try:
            return self._take(state, event, expected), ()
        except Abort as abort:
            abort.state = state
            raise

    def awaited(self, state: ServerState) -> frozenset[int]:
        """Clients that have yet to speak in this phase; when there are none, close it."""
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
        """Clients whose vectors are in the sum."""
        return tuple(state.roster[index] for index in sorted(state.inputs))

    def result(self, state: ServerState) -> np.ndarray:
        """The sum of the survivors' vectors, once the session is done."""
        if state.phase is not Phase.DONE:
            raise Abort(Reason.UNEXPECTED, f"no sum while {state.phase}; go on until the session is done", state)
        return np.frombuffer(state.result, state.invite.config.dtype)

    def _take(self, state: ServerState, data: bytes, expected: type) -> ServerState:
        """One client's message, if it is due and signed."""
        envelope = wire.read_envelope(data, _limit(state))
        if envelope.session != state.session:
            raise Abort(Reason.WRONG_SESSION, f"client {envelope.sender} speaks of another session; ignore it")
        who = self._place(state, envelope.sender)
        if not wire.signed_by(self.registry[envelope.sender], envelope):
            raise Abort(Reason.BAD_SIGNATURE, f"a message that client {envelope.sender} did not sign; ignore it")
        body: wire.AnyMessage = wire.read_body(envelope, expected)
        match body:
            case Advert():
                record = wire.record(who, body, envelope.signature)
                return state._replace(adverts={**state.adverts, who: record})
            case Shares():
                _check_length(envelope.sender, body.sealed, wire.SEALED * _parameters(state).degree)
                return state._replace(shares={**state.shares, who: body.sealed})
            case Masked():
                return _add(state, who, body)
            case Consent():
                if body.digest != self._digest(state):
                    raise Abort(Reason.INCONSISTENT, f"client {envelope.sender} saw other survivors; drop it")
                return state._replace(consents={**state.consents, who: envelope.signature})
            case Reveal():
                owners = _graph(state).holders(who).tolist()
                _check_length(envelope.sender, body.shares, SHARE * sum(u in state.shares for u in owners))
                return state._replace(reveals={**state.reveals, who: body.shares})
        raise AssertionError(f"{expected} is in the table, but nothing takes it")

    def _place(self, state: ServerState, client: int) -> int:
        """What the client goes by in this phase, if it is one that is waited for."""
        if state.phase is Phase.ADVERTISE:
            who, there, done = client, _invited(state.invite, client), client in state.adverts
        else:
            who = _found(state.roster, client)
            consenting = state.consents if state.invite.config.mode == "active" else state.inputs
            there, done = {
                Phase.SHARE: (who >= 0, who in state.shares),
                Phase.INPUT: (who in state.shares, who in state.inputs),
                Phase.CONSENT: (who in state.inputs, who in state.consents),
                Phase.UNMASK: (who in consenting, who in state.reveals),
            }[state.phase]
        if not there:
            raise Abort(Reason.UNKNOWN_SENDER, f"client {client} takes no part in {state.phase}; ignore it")
        if done:
            raise Abort(Reason.DUPLICATE, f"client {client} spoke twice while {state.phase}; its first word counts")
        return who

    def _close(self, state: ServerState, phase: Phase) -> Step:
        """End a phase; `state` is already in the next one."""
        match phase:
            case Phase.ADVERTISE:
                state = state._replace(roster=tuple(sorted(state.adverts)))
                levels = tree.build([state.adverts[client] for client in state.roster] or [b""])
                state = state._replace(root=tree.root(levels, len(state.roster)))
                _need(len(state.roster), _parameters(state).min_survivors)
                return state, self._rosters(state, levels)
            case Phase.SHARE:
                _need(len(state.shares), _parameters(state).min_survivors)
                return state._replace(total=bytes(state.invite.config.num_bytes)), self._mailboxes(state)
            case Phase.INPUT:
                _need(len(state.inputs), _parameters(state).min_survivors)
                return state, self._to_all(state, self.survivors(state), Survivors(_survivor_bits(state)))
            case Phase.CONSENT:
                _need(len(state.consents), _parameters(state).threshold)
                return state, self._consents(state)
            case Phase.UNMASK:
                return _open(state), ()
        raise AssertionError(f"{phase} is in the table, but nothing closes it")

    def _rosters(self, state: ServerState, levels: list[list[bytes]]) -> Iterator[Out]:
        table = _graph(state).table()
        records = [state.adverts[client] for client in state.roster]
        proofs = [tree.proof(levels, index) for index in range(len(state.roster))]
        for index, client in enumerate(state.roster):
            neighbours = table[index].tolist()
            roster = Roster(
                len(state.roster),
                index,
                state.root,
                b"".join([records[other] for other in neighbours]),
                b"".join([proofs[other] for other in (index, *neighbours)]),
            )
            yield self._to(state, client, roster)

    def _mailboxes(self, state: ServerState) -> Iterator[Out]:
        table, size = _graph(state).table(), wire.SEALED
        shared = _marks(len(state.roster), state.shares)
        for index in sorted(state.shares):
            neighbours = table[index]
            senders = neighbours[shared[neighbours]]
            slots = (table[senders] < index).sum(axis=1)  # where each of them keeps what is for this client
            sealed = [
                state.shares[sender][size * slot : size * (slot + 1)]
                for sender, slot in zip(senders.tolist(), slots.tolist(), strict=True)
            ]
            yield self._to(state, state.roster[index], Mailbox(wire.pack_bits(shared[neighbours]), b"".join(sealed)))

    def _consents(self, state: ServerState) -> Iterator[Out]:
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


def _add(state: ServerState, who: int, masked: Masked) -> ServerState:
    config = state.invite.config
    _check_length(state.roster[who], masked.vector, config.num_bytes)
    total = np.frombuffer(state.total, config.dtype) + np.frombuffer(masked.vector, config.dtype)
    return state._replace(total=total.tobytes(), inputs=state.inputs | {who})


def _open(state: ServerState) -> ServerState:
    """Take the masks off, and forget all that is secret."""
    config = state.invite.config
    opened = Opened(
        session=state.session,
        graph=_graph(state),
        records=[state.adverts[client] for client in state.roster],
        shared=_marks(len(state.roster), state.shares),
        survived=_marks(len(state.roster), state.inputs),
        reveals=state.reveals,
    )
    total = np.frombuffer(state.total, config.dtype).copy()
    unmask(total, opened)
    return state._replace(adverts={}, shares={}, consents={}, reveals={}, total=b"", result=total.tobytes())


def _limit(state: ServerState) -> int:
    """The most bytes that a message which is due can have."""
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


def _found(clients: tuple[int, ...], client: int) -> int:
    """The place of a client in an ascending list, or -1."""
    at = bisect_left(clients, client)
    return at if at < len(clients) and clients[at] == client else -1


def _marks(num: int, indices: Iterable[int]) -> np.ndarray:
    marks = np.zeros(num, bool)
    marks[list(indices)] = True
    return marks


def _survivor_bits(state: ServerState) -> bytes:
    return wire.pack_bits(_marks(len(state.roster), state.inputs))


def _check_length(client: int, data: bytes | memoryview, num: int) -> None:
    if len(data) != num:
        raise Abort(Reason.MALFORMED, f"{len(data)} bytes of client {client} where {num} are due; drop it")


def _need(num: int, least: int) -> None:
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
