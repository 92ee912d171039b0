"""A whole session in one process: every message is encoded, every state is serialised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.secagg import client_state as c
from atoll.secagg import server as s
from atoll.secagg import wire
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import ClientState, Floors, Vector
from atoll.secagg.encoding import Encoding
from atoll.secagg.saved import dump, load
from atoll.secagg.server import Close, Server, ServerState
from atoll.secagg.wire import Config, Invite

MODEL = bytes(range(32))
STEPS = ("advert", "shares", "masked", "consent", "reveal")
"""Messages that a client can fail to send."""
SENT_IN = {
    s.Phase.ADVERTISE: "advert",
    s.Phase.SHARE: "shares",
    s.Phase.INPUT: "masked",
    s.Phase.CONSENT: "consent",
    s.Phase.UNMASK: "reveal",
}


@cache
def identity(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public(number: int) -> bytes:
    return identity(number).public_key().public_bytes_raw()


@dataclass(frozen=True)
class Federation:
    server: Server
    clients: Mapping[int, Client]
    invite: Invite

    @property
    def config(self) -> Config:
        return self.invite.config

    def with_config(self, **changes: Any) -> Federation:
        config = wire.Config(
            **{name: changes.get(name, getattr(self.config, name)) for name in Config.__struct_fields__}
        )
        return replace(self, invite=invite(tuple(self.clients), config))


def invite(clients: tuple[int, ...], config: Config, **changes: Any) -> Invite:
    fields = {"run": "test", "round": 3, "attempt": 0, "config": config, "model": MODEL, "cohort": wire.cohort(clients)}
    return Invite(**{**fields, **changes})


def federation(
    num: int,
    *,
    mode: wire.Mode = "active",
    length: int = 5,
    dropouts: float = 0.0,
    colluding: float = 0.0,
    bits: Any = 32,
    floors: Floors | None = None,
    stride: int = 7,
) -> Federation:
    """Return clients 5, 12, 19, ..., whose numbers differ from their places in a roster."""
    numbers = tuple(5 + stride * i for i in range(num))
    registry = {number: public(number) for number in numbers}
    config = Config(length, Encoding(1.0, 16, bits), mode, dropouts, colluding)
    floors = floors or Floors(mode=mode, min_cohort=2, min_survivors=2)
    clients = {
        number: Client(
            client=number,
            identity=identity(number),
            server_key=public(-1),
            once=in_memory(),
            registry=registry,
            floors=floors,
        )
        for number in numbers
    }
    return Federation(Server(identity=identity(-1), registry=registry), clients, invite(numbers, config))


def vectors(fed: Federation) -> dict[int, np.ndarray]:
    """Return random integers whose sum wraps around."""
    return {n: np.frombuffer(os.urandom(fed.config.num_bytes), fed.config.dtype) for n in fed.clients}


def exact_sum(fed: Federation, inputs: Mapping[int, np.ndarray], survivors: tuple[int, ...]) -> np.ndarray:
    total = [sum(int(inputs[n][at]) for n in survivors) for at in range(fed.config.length)]
    return np.array([value % (1 << fed.config.encoding.modulus_bits) for value in total], fed.config.dtype)


def run(fed: Federation, inputs: Mapping[int, np.ndarray], lost: Mapping[int, str] | None = None) -> ServerState:
    """Run a session in which some clients drop out at one of the STEPS; Abort is raised to the caller."""
    state, out = fed.server.open(fed.invite)
    states = {number: client.begin(MODEL) for number, client in fed.clients.items()}
    return go_on(fed, state, states, list(out), inputs, lost or {})


def go_on(
    fed: Federation,
    state: ServerState,
    states: dict[int, ClientState],
    out: list[s.Out],
    inputs: Mapping[int, np.ndarray],
    lost: Mapping[int, str],
) -> ServerState:
    silent: set[int] = set()
    while state.phase is not s.Phase.DONE:
        silent |= {number for number, step in lost.items() if step == SENT_IN[state.phase]}
        for number, data in out:
            if number in silent:
                continue
            states[number], replies = answer(fed.clients[number], states[number], data, inputs[number])
            for reply in replies:
                state, _ = fed.server.handle(state, reply)
        state = load(dump(state), ServerState)
        assert silent or not fed.server.awaited(state)
        state, later = fed.server.handle(state, Close(state.phase))
        out = list(later)
    return state


def answer(client: Client, state: ClientState, data: bytes, values: np.ndarray) -> tuple[ClientState, list[bytes]]:
    """Return a client's answer to a message; it always has its vector."""
    state, replies = client.handle(load(dump(state), ClientState), data)
    if state.phase is c.Phase.READY:
        state, replies = client.handle(load(dump(state), ClientState), Vector(values))
    return state, replies
