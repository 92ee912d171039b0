"""Pairwise masks that cancel in the sum, also if clients drop out."""

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
from atoll.secagg.scheme import Ask, ClientHost, Message, Outcome, Responder, Scheme, Session, batches
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
    """Add a mask for each neighbour and an own mask to each vector (Bonawitz et al. 2017; Bell et al. 2020, 2020/704).

    `server` is the behaviour that is withstood: "curious" reads everything it receives, "active" also lies. A sum
    exists as long as no more than the share `dropouts` of the clients is lost, and single updates stay hidden from a
    server that colludes with a share `colluding` of the clients.
    """
    floors = Floors(mode=server)

    def check(num_clients: int) -> None:
        if num_clients < floors.min_cohort:
            raise PlanError(f"pairwise masks need at least {floors.min_cohort} clients, got {num_clients}: ask more")
        parameters(num_clients, dropouts, colluding, server)

    def invite(session: Session) -> wire.Invite:
        return wire.Invite(
            run=session.run,
            round=session.round,
            attempt=session.attempt,
            config=wire.Config(
                length=session.length,
                encoding=session.encoding,
                mode=server,
                dropouts=dropouts,
                colluding=colluding,
            ),
            model=session.model,
            cohort=wire.cohort(session.clients),
        )

    def simulate(session: Session, host: ClientHost) -> Outcome:
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
                floors=floors._replace(min_survivors=session.min_survivors),
            )

        with host(lambda: _responder(session, client)) as ask:
            return _run(session, machine, invite(session), ask)

    steps = tuple(name for phase, name in STEPS.items() if server == "active" or phase is not Phase.CONSENT)
    return Scheme(
        simulate=simulate, steps=steps, counts_from=steps.index("input"), check=check, invite=invite, mode=server
    )


def _run(session: Session, server: Server, invite: wire.Invite, ask: Ask) -> Outcome:
    """Exchange messages between server and clients until the sum is open, or too few clients are left."""
    try:
        state, out = server.open(invite)
    except PlanError as error:  # a sampler may have drawn too few clients
        return Outcome(total_L=None, survivors=(), bytes_up=0, bytes_down=0, why=str(error))
    lost: set[int] = set()
    up = down = 0
    while state.phase is not Phase.DONE:
        lost |= {client for client, step in session.silent.items() if step == STEPS[state.phase]}
        delivered = (Message(*message) for message in out if message.client not in lost)
        for messages in batches(delivered):
            down += sum(len(message.data) for message in messages)
            for answer in ask(messages):
                up += len(answer)
                state, _ = server.handle(state, answer)
        try:
            state, out = server.handle(state, Close(state.phase))
        except Abort as abort:
            return Outcome(total_L=None, survivors=(), bytes_up=up, bytes_down=down, why=str(abort))
    return Outcome(total_L=server.result(state), survivors=server.survivors(state), bytes_up=up, bytes_down=down)


def _responder(session: Session, client: Callable[[int], Client]) -> Responder:
    """Return a function that runs the state machines of clients; a client that aborts does not answer any more."""
    clients: dict[int, Client] = {}
    states: dict[int, ClientState] = {}

    def respond(messages: list[Message]) -> Iterator[bytes]:
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

    return respond
