"""The client's side of one session: `handle(state, event) -> (state, messages for the server)`, without I/O.

Every refusal raises Abort and leaves a final state without secrets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.core.errors import PlanError
from atoll.secagg import keys, masks, shamir, tree, wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.client_state import (
    NEXT,
    ClientState,
    Floors,
    Peer,
    Phase,
    Vector,
    config_of,
    graph_of,
    limit,
    parameters_of,
)
from atoll.secagg.graph import Graph
from atoll.secagg.wire import (
    Advert,
    Consent,
    Consents,
    Invite,
    Mailbox,
    Masked,
    Reveal,
    Roster,
    Shares,
    Survivors,
    survivor_digest,
)

DEFAULT_FLOORS = Floors()
Step = tuple[ClientState, list[bytes]]


def in_memory() -> Callable[[bytes], bool]:
    """Return a `once` that remembers for the life of this process: enough for a simulation, not for a real client."""
    seen: set[bytes] = set()

    def once(action: bytes) -> bool:
        first_time = action not in seen
        seen.add(action)
        return first_time

    return once


@dataclass(frozen=True, kw_only=True)
class Client:
    """The client's settings that hold for all sessions: its identity, known keys and minimum requirements."""

    client: int
    """Number of the client."""
    identity: Ed25519PrivateKey
    server_key: bytes
    """The server's Ed25519 public key."""
    once: Callable[[bytes], bool]
    """Bytes that name an action -> whether this is the first call with them, ever; recorded on disk before it returns.

    It is called before keys are made, shares sealed, a vector masked or survivors accepted: a client that crashes and
    restarts from an older state can do none of these a second time."""
    registry: Mapping[int, bytes] | None = None
    """Ed25519 public keys of all clients, from a source other than the server; required against an active server.

    With a registry, cohorts may hold only its clients, and every advert is verified against it, in any mode."""
    floors: Floors = DEFAULT_FLOORS
    """Minimum requirements of a session."""
    random: Callable[[int], bytes] = os.urandom
    """Source of secret random bytes."""

    def __post_init__(self) -> None:
        if self.floors.mode == "active" and self.registry is None:
            raise PlanError(
                "protection against an active server needs the clients' public keys: pass registry, or set "
                'floors.mode to "curious"'
            )

    def begin(self, model: bytes) -> ClientState:
        """Return the state that waits for an invitation to train the model with this hash."""
        return ClientState(model=model)

    def handle(self, state: ClientState, event: bytes | Vector) -> Step:
        """Process a message of the server, or the client's own vector."""
        try:
            return self._step(state, event)
        except Abort as abort:
            abort.state = ClientState(phase=Phase.ABORTED, session=state.session)
            raise

    def _step(self, state: ClientState, event: bytes | Vector) -> Step:
        table = NEXT[state.config.mode if state.config else "active"]
        if state.phase not in table:
            raise Abort(Reason.UNEXPECTED, f"this session is {state.phase}; begin a new one")
        expected, next_phase = table[state.phase]
        if isinstance(event, Vector) or expected is Vector:
            if not (isinstance(event, Vector) and expected is Vector):
                raise Abort(Reason.UNEXPECTED, f"got {type(event).__name__} while {state.phase}; begin a new session")
            return self._mask(state._replace(phase=next_phase), event)
        envelope = wire.read_envelope(event, limit(state))
        if state.session and envelope.session != state.session:
            raise Abort(Reason.WRONG_SESSION, "the message is for another session; begin a new one")
        if envelope.sender != wire.SERVER or not wire.signed_by(self.server_key, envelope):
            raise Abort(Reason.BAD_SIGNATURE, "the server did not sign the message; check the server's key")
        body: wire.AnyMessage = wire.read_body(envelope, expected)
        state = state._replace(phase=next_phase)
        match body:
            case Invite():
                return self._advertise(state, body, envelope.session)
            case Roster():
                return self._share(state, body)
            case Mailbox():
                return self._collect(state, body), []
            case Survivors():
                return self._survivors(state, body)
            case Consents():
                return self._consents(state, body)
        raise AssertionError(f"{expected} is in the table, but has no handler")

    def _advertise(self, state: ClientState, invite: Invite, session: bytes) -> Step:
        """Step 1: make fresh keys and sign them."""
        self._check_invite(state, invite, session)
        if not self.once(b"join" + session):
            raise Abort(Reason.KEYS_SPENT, "this session was joined before; ask for a new attempt")
        mask_private, channel_private, own_secret = (self.random(32) for _ in range(3))
        advert = Advert(
            mask_key=keys.public_key(mask_private),
            channel_key=keys.public_key(channel_private),
            commitment=keys.commitment(own_secret, session),
        )
        envelope = wire.sign(self.identity, self.client, session, advert)
        state = state._replace(
            session=session,
            config=invite.config,
            cohort_size=len(invite.cohort) // 8,
            mask_private=mask_private,
            channel_private=channel_private,
            own_secret=own_secret,
            record=wire.record(self.client, advert, envelope.signature),
        )
        return state, [wire.encode(envelope)]

    def _check_invite(self, state: ClientState, invite: Invite, session: bytes) -> None:
        """Refuse an invitation that is not for this client, or below its minimum requirements."""
        floors, config = self.floors, invite.config
        if wire.session_id(invite) != session:
            raise Abort(
                Reason.WRONG_SESSION, "the invitation does not match its session; stop working with this server"
            )
        if invite.model != state.model:
            raise Abort(
                Reason.WRONG_MODEL, "the session is for another model than this client's; fetch the model again"
            )
        if (floors.mode == "active" and config.mode != "active") or config.colluding < floors.min_colluding:
            raise Abort(
                Reason.WRONG_MODE,
                f"the session protects against a {config.mode} server with {config.colluding:.0%} colluders, this "
                f"client requires {floors.mode} and {floors.min_colluding:.0%}; raise the server's settings or lower "
                "the client's",
            )
        clients = wire.read_cohort(invite)
        if self.client not in clients:
            raise Abort(Reason.UNKNOWN_SENDER, f"client {self.client} is not in the cohort; ignore this session")
        if len(clients) < floors.min_cohort:
            raise Abort(
                Reason.SMALL_COHORT,
                f"the cohort has {len(clients)} clients, this client requires {floors.min_cohort}; ask more clients",
            )
        if self.registry is not None:
            unknown = [client for client in clients if client not in self.registry]
            if unknown:
                raise Abort(
                    Reason.UNKNOWN_SENDER,
                    f"{len(unknown)} clients of the cohort are not in the registry, such as {unknown[0]}; update the "
                    "registry",
                )

    def _share(self, state: ClientState, roster: Roster) -> Step:
        """Step 2: verify the neighbours' keys, and send each of them a share of both secrets."""
        if roster.num_clients > state.cohort_size or roster.index >= roster.num_clients:
            raise Abort(Reason.BAD_ROSTER, "the roster is larger than the cohort; stop working with this server")
        if roster.num_clients < self.floors.min_cohort:
            raise Abort(
                Reason.SMALL_COHORT,
                f"{roster.num_clients} clients sent keys, this client requires {self.floors.min_cohort}; ask more "
                "clients",
            )
        state = state._replace(num_clients=roster.num_clients, place=roster.index, root=roster.root)
        params = parameters_of(state)
        if params.threshold < self.floors.min_threshold:
            raise Abort(
                Reason.LOW_THRESHOLD,
                f"the threshold is {params.threshold}, this client requires {self.floors.min_threshold}; ask more "
                "clients or plan for more colluders",
            )
        ring = graph_of(state)
        own_key = keys.public_key(state.channel_private)
        private = X25519PrivateKey.from_private_bytes(state.channel_private)
        peers = {
            index: Peer(
                client=client,
                mask_key=advert.mask_key,
                channel=keys.agree(private, own_key, advert.channel_key, state.session, b"channel"),
            )
            for index, client, advert in self._read_roster(state, roster, ring)
        }
        if not self.once(b"shares" + state.session):
            raise Abort(Reason.KEYS_SPENT, "shares of this session were sealed before; ask for a new attempt")
        holders = ring.holders(state.place).tolist()
        pairs = map(
            bytes.__add__,
            shamir.split(state.own_secret, params.threshold, len(holders), self.random),
            shamir.split(state.mask_private, params.threshold, len(holders), self.random),
        )
        shares = dict(zip(holders, pairs, strict=True))
        held = {state.place: shares.pop(state.place)} if params.complete else {}
        sealed = [
            keys.seal(peers[index].channel, state.session, self.client, peers[index].client, pair)
            for index, pair in shares.items()
        ]
        return self._send(state._replace(peers=peers, held=held), Shares(b"".join(sealed)))

    def _read_roster(self, state: ClientState, roster: Roster, ring: Graph) -> Iterator[tuple[int, int, Advert]]:
        """Yield place, client and advert of each neighbour, after proving them under one root with the client's own."""
        neighbours, size = ring.neighbours(state.place).tolist(), wire.RECORD.size
        length = wire.HASH * tree.depth(state.num_clients)
        if len(roster.records) != size * len(neighbours) or len(roster.proofs) != length * (len(neighbours) + 1):
            raise Abort(
                Reason.BAD_ROSTER,
                "the roster's records do not match its number of clients; stop working with this server",
            )
        records = {state.place: state.record}
        records |= {index: roster.records[size * at : size * (at + 1)] for at, index in enumerate(neighbours)}
        for at, index in enumerate([state.place, *neighbours]):
            proof = roster.proofs[length * at : length * (at + 1)]
            if not tree.proves(proof, records[index], index, state.num_clients, state.root):
                raise Abort(Reason.BAD_ROSTER, "keys are not under the roster's root; stop working with this server")
        last = -1
        for index in sorted(records):
            client, advert, signature = wire.read_record(records[index])
            if client <= last:
                raise Abort(Reason.BAD_ROSTER, "the roster is not in ascending order; stop working with this server")
            last = client
            if index != state.place:
                self._verify(state, client, advert, signature)
                yield index, client, advert

    def _verify(self, state: ClientState, client: int, message: Advert | Consent, signature: bytes) -> None:
        """Verify another client's signature on a message, in every mode, if there is a registry."""
        if self.registry is None:
            return
        if client not in self.registry:
            raise Abort(Reason.UNKNOWN_SENDER, f"client {client} is not in the registry; update the registry")
        if not wire.holds(self.registry[client], client, state.session, wire.encode(message), signature):
            raise Abort(
                Reason.BAD_SIGNATURE,
                f"client {client} did not sign what the server says; stop working with this server",
            )

    def _collect(self, state: ClientState, mailbox: Mailbox) -> ClientState:
        """Step 2, end: decrypt the neighbours' shares."""
        sent = wire.read_bits(mailbox.senders, len(state.peers))
        if len(mailbox.sealed) != wire.SEALED * int(sent.sum()):
            raise Abort(
                Reason.MALFORMED,
                "the numbers of shares and senders in the mailbox differ; stop working with this server",
            )
        peers = {index: state.peers[index] for index, sender in zip(sorted(state.peers), sent, strict=True) if sender}
        held = dict(state.held)
        for at, (index, peer) in enumerate(peers.items()):
            sealed = mailbox.sealed[wire.SEALED * at : wire.SEALED * (at + 1)]
            held[index] = keys.unseal(peer.channel, state.session, peer.client, self.client, sealed)
        if len(held) < parameters_of(state).threshold:
            raise Abort(
                Reason.TOO_FEW,
                f"{len(held)} neighbours shared, {parameters_of(state).threshold} are needed; start a new attempt",
            )
        return state._replace(peers=peers, held=held)

    def _mask(self, state: ClientState, vector: Vector) -> Step:
        """Step 3: add the client's own mask and one mask for each neighbour to the vector, once in a session."""
        config, values = config_of(state), vector.values
        if values.dtype != config.dtype or values.shape != (config.length,):
            raise Abort(
                Reason.BAD_VECTOR,
                f"the vector is {values.shape} {values.dtype}, but ({config.length},) {config.dtype} was agreed; "
                "encode it again",
            )
        if not self.once(b"vector" + state.session):
            raise Abort(Reason.KEYS_SPENT, "the keys of this session masked a vector before; ask for a new attempt")
        masked = values.copy()
        masks.apply(masked, self._masks(state))
        return self._send(state._replace(own_secret=b"", mask_private=b""), Masked(masked.data.cast("B")))

    def _masks(self, state: ClientState) -> Iterator[masks.Mask]:
        """Yield the client's own mask and the masks that it shares with its neighbours."""
        yield masks.Mask(keys.own_mask_seed(state.own_secret, state.session), True)
        own_key = keys.public_key(state.mask_private)
        private = X25519PrivateKey.from_private_bytes(state.mask_private)
        for peer in state.peers.values():
            seed = keys.agree(private, own_key, peer.mask_key, state.session, b"mask")
            yield masks.Mask(seed, self.client < peer.client)

    def _survivors(self, state: ClientState, message: Survivors) -> Step:
        """Step 4: accept one survivor set, and sign it against an active server."""
        survived = wire.read_bits(message.bits, state.num_clients)
        least = max(parameters_of(state).min_survivors, self.floors.min_survivors)
        if int(survived.sum()) < least:
            raise Abort(
                Reason.TOO_FEW, f"{int(survived.sum())} clients survived, {least} are needed; start a new attempt"
            )
        neighbours = graph_of(state).neighbours(state.place)
        surviving = neighbours[survived[neighbours]].tolist()
        if not survived[state.place] or any(index not in state.held for index in surviving):
            raise Abort(
                Reason.INCONSISTENT,
                "the survivors are not the clients that sent shares and a vector; stop working with this server",
            )
        if not self.once(b"survivors" + state.session):
            raise Abort(
                Reason.INCONSISTENT,
                "survivors of this session were accepted before; stop working with this server",
            )
        state = state._replace(survivors=message.bits)
        if state.phase is Phase.DONE:
            return self._reveal(state)
        return self._send(state, Consent(survivor_digest(state.session, state.root, state.survivors)))

    def _consents(self, state: ClientState, message: Consents) -> Step:
        """Step 5: reveal shares once enough neighbours have signed the same survivor set."""
        agreed = Consent(survivor_digest(state.session, state.root, state.survivors))
        params = parameters_of(state)
        neighbours = graph_of(state).neighbours(state.place)
        sent = wire.read_bits(message.senders, params.degree)
        if len(message.signatures) != wire.SIGNATURE * int(sent.sum()):
            raise Abort(Reason.MALFORMED, "the numbers of signatures and senders differ; stop working with this server")
        for at, index in enumerate(neighbours[sent].tolist()):
            if index not in state.peers:
                raise Abort(
                    Reason.INCONSISTENT,
                    "a client consented that never sent shares; stop working with this server",
                )
            signature = message.signatures[wire.SIGNATURE * at : wire.SIGNATURE * (at + 1)]
            self._verify(state, state.peers[index].client, agreed, signature)
        num = int(sent.sum()) + params.complete
        if num < params.threshold:
            raise Abort(
                Reason.INCONSISTENT,
                f"{num} clients signed the same survivors, {params.threshold} are needed; start a new attempt",
            )
        return self._reveal(state)

    def _reveal(self, state: ClientState) -> Step:
        """Send one share for each neighbour: of its own mask if it survived, else of its mask key; never both."""
        survived = wire.read_bits(state.survivors, state.num_clients)
        shares = [
            state.held[index][: shamir.SHARE] if survived[index] else state.held[index][shamir.SHARE :]
            for index in sorted(state.held)
        ]
        _, out = self._send(state, Reveal(b"".join(shares)))
        return ClientState(phase=Phase.DONE, session=state.session), out

    def _send(self, state: ClientState, message: Shares | Masked | Consent | Reveal) -> Step:
        return state, [wire.encode(wire.sign(self.identity, self.client, state.session, message))]
