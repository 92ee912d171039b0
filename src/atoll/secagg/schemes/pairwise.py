"""Pairwise masks that cancel in the sum, and survive drop-outs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import PlanError
from atoll.core.options import ShareBelowOne
from atoll.secagg import client_state, wire
from atoll.secagg.aborts import Abort
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import ClientState, Floors, Vector
from atoll.secagg.graph import parameters
from atoll.secagg.scheme import Ask, Message, Outcome, Player, Scheme, Session, Stage, batches
from atoll.secagg.server import Close, Phase, Server

STEPS = {
    Phase.ADVERTISE: "advertise",
    Phase.SHARE: "share",
    Phase.INPUT: "input",
    Phase.CONSENT: "consent",
    Phase.UNMASK: "unmask",
}

EXAMPLE = {"dropouts": 0.4}


def pairwise(server: wire.Mode = "active", dropouts: ShareBelowOne = 0.2, colluding: ShareBelowOne = 0.1) -> Scheme:
    """Mask with every neighbour and with a mask of one's own (Bonawitz et al. 2017; Bell et al. 2020, eprint 2020/704).

    `server` is what the server may do: "curious" looks at everything it is sent, "active" may also lie. A sum exists as
    long as no more than the share `dropouts` is lost, and is safe from the server with a share `colluding` of clients.
    """
    floors = Floors(mode=server)

    def check(num_clients: int) -> None:
        if num_clients < floors.min_cohort:
            raise PlanError(f"pairwise masks need at least {floors.min_cohort} clients, got {num_clients}: ask more")
        parameters(num_clients, dropouts, colluding, server)

    def invite(session: Session) -> wire.Invite:
        config = wire.Config(session.length, session.encoding, server, dropouts, colluding)
        cohort = wire.cohort(session.clients)
        return wire.Invite(session.run, session.round, session.attempt, config, session.model, cohort)

    def play(session: Session, stage: Stage) -> Outcome:
        identities = {client: Ed25519PrivateKey.generate() for client in (wire.SERVER, *session.clients)}
        registry = {client: key.public_key().public_bytes_raw() for client, key in identities.items()}
        machine = Server(identity=identities[wire.SERVER], registry=registry)

        def client(number: int) -> Client:
            return Client(
                client=number,
                identity=identities[number],
                server_key=registry[wire.SERVER],
                once=in_memory(),
                registry=registry if server == "active" else None,
                floors=floors._replace(min_survivors=session.least),
            )

        with stage(lambda: _player(session, client)) as ask:
            return _run(session, machine, invite(session), ask)

    steps = tuple(name for phase, name in STEPS.items() if server == "active" or phase is not Phase.CONSENT)
    return Scheme(play, steps, steps.index("input"), check, invite=invite, mode=server)


def _run(session: Session, server: Server, invite: wire.Invite, ask: Ask) -> Outcome:
    """Let server and clients speak until the sum is open, or too few are left."""
    try:
        state, out = server.open(invite)
    except PlanError as error:  # a sampler may have drawn too few
        return Outcome(None, (), 0, 0, str(error))
    silent: set[int] = set()
    up = down = 0
    while state.phase is not Phase.DONE:
        silent |= {client for client, step in session.silent.items() if step == STEPS[state.phase]}
        heard = (Message(*each) for each in out if each.client not in silent)
        for messages in batches(heard):
            down += sum(len(message.data) for message in messages)
            for answer in ask(messages):
                up += len(answer)
                state, _ = server.handle(state, answer)
        try:
            state, out = server.handle(state, Close(state.phase))
        except Abort as abort:
            return Outcome(None, (), up, down, str(abort))
    return Outcome(server.result(state), server.survivors(state), up, down)


def _player(session: Session, client: Callable[[int], Client]) -> Player:
    """Play clients as they are spoken to; one that refuses says nothing more."""
    clients: dict[int, Client] = {}
    states: dict[int, ClientState] = {}

    def play(messages: list[Message]) -> Iterator[bytes]:
        for number, data in messages:
            if number not in clients:
                clients[number] = client(number)
                states[number] = clients[number].begin(session.model)
            machine = clients[number]
            try:
                states[number], answers = machine.handle(states[number], data)
                if states[number].phase is client_state.Phase.READY:
                    states[number], answers = machine.handle(states[number], Vector(session.vector(number)))
            except Abort as abort:
                states[number], answers = abort.state, []
            yield from answers

    return play
