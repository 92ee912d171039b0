"""Fuzz tests: for any messages in any order the machines continue or raise Abort, with a defined state."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from secagg.harness import MODEL, Federation, federation, identity, vectors

from atoll.secagg import client_state as c
from atoll.secagg import server as s
from atoll.secagg import wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.client import Client
from atoll.secagg.client_state import ClientState, Vector
from atoll.secagg.server import Close, Server, ServerState


class Pool(NamedTuple):
    """An honest session: every state of the machines, and all messages."""

    fed: Federation
    clients: list[tuple[Client, ClientState]]
    servers: list[ServerState]
    down: list[bytes]
    up: list[bytes]


@cache
def pool(num: int, mode: wire.Mode) -> Pool:
    fed = federation(num, mode=mode, dropouts=0.2, colluding=0.05)
    fed = replace(fed, clients={n: replace(client, once=lambda what: True) for n, client in fed.clients.items()})
    inputs, session = vectors(fed), Pool(fed, [], [], [], [])
    state, out = fed.server.open(fed.invite)
    states = {n: client.begin(MODEL) for n, client in fed.clients.items()}
    while state.phase is not s.Phase.DONE:
        for number, data in out:
            session.down.append(data)
            client = fed.clients[number]
            session.clients.append((client, states[number]))
            states[number], replies = client.handle(states[number], data)
            if states[number].phase is c.Phase.READY:
                session.clients.append((client, states[number]))
                states[number], replies = client.handle(states[number], Vector(inputs[number]))
            for reply in replies:
                session.up.append(reply)
                session.servers.append(state)
                state, _ = fed.server.handle(state, reply)
        session.servers.append(state)
        state, out = fed.server.handle(state, Close(state.phase))
        out = list(out)
    session.servers.append(state)
    session.clients.extend((fed.clients[n], states[n]) for n in list(states)[:3])
    return session


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes that are flipped, cut, extended, doubled or replaced."""
    match rng.randrange(7):
        case 0 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[: rng.randrange(len(data) + 1)]
        case 2:
            return data + rng.randbytes(rng.randrange(1, 40))
        case 3:
            return rng.randbytes(rng.choice([0, 1, 8, 32, 33, 82, 200]))
        case 4:
            return data + data
        case 5:
            return bytes(len(data))
        case _:
            return data + bytes(rng.choice([1000, 100_000]))


def changed_field(rng: random.Random, value: Any) -> Any:
    match value:
        case bytes():
            return changed_bytes(rng, value)
        case memoryview():
            return memoryview(changed_bytes(rng, bytes(value)))
        case int():
            return rng.choice([0, 1, value + 1, value - 1, -5, 1 << 20, (1 << 63) - 1])
        case float():
            return rng.choice([0.0, 0.5, 0.99, -1.0, float("nan"), float("inf")])
        case str():
            return rng.choice(["", "x" * 300, "é"])
        case _:
            return value


def changed_message(rng: random.Random, data: bytes) -> bytes:
    """Return a message with one field changed, signed again by its sender."""
    envelope = wire.read_envelope(data, 1 << 30)
    message = wire.read_body(envelope, wire.Message)
    target = message.config if isinstance(message, wire.Invite) and rng.random() < 0.5 else message
    name = rng.choice(target.__struct_fields__)
    changed = msgspec.structs.replace(target, **{name: changed_field(rng, getattr(target, name))})
    if target is not message:
        changed = msgspec.structs.replace(message, config=changed)
    session = envelope.session
    if isinstance(changed, wire.Invite):
        session = wire.session_id(changed)
    try:
        return wire.encode(wire.sign(identity(envelope.sender), envelope.sender, session, changed))
    except (OverflowError, msgspec.MsgspecError):
        return data


def event(rng: random.Random, said: list[bytes], due: list[bytes]) -> bytes:
    """Return a message of the session, or the next one, unchanged or changed."""
    data = rng.choice(due if due and rng.random() < 0.7 else said)
    match rng.randrange(6):
        case 0:
            return data
        case 1 | 2:
            return changed_bytes(rng, data)
        case _:
            return changed_message(rng, data)


def odd_vector(rng: random.Random, length: int) -> Vector:
    shape = rng.choice([(length,), (length + 1,), (0,), (length, 1), ()])
    return Vector(np.zeros(shape, rng.choice(["<u4", "<u8", "<f4", "<i4", "?"])))


def fuzz_client(rng: random.Random, session: Pool, steps: int) -> Reason | None:
    client, state = rng.choice(session.clients)
    for _ in range(steps):
        before = state
        try:
            kinds = c.NEXT[session.fed.config.mode]
            due = [d for d in session.down if state.phase in kinds and tag(d) is kinds[state.phase][0]]
            odd = state.phase is c.Phase.READY or rng.random() < 0.05
            message = odd_vector(rng, session.fed.config.length) if odd else event(rng, session.down, due)
            state, out = client.handle(state, message)
            assert isinstance(state, ClientState)
            assert all(isinstance(reply, bytes) for reply in out)
        except Abort as abort:
            assert abort.state == ClientState(phase=c.Phase.ABORTED, session=before.session)
            with pytest.raises(Abort, match="aborted"):
                client.handle(abort.state, rng.choice(session.down))
            return abort.reason
    return None


def fuzz_server(rng: random.Random, session: Pool, steps: int) -> Reason | None:
    server: Server = session.fed.server
    state, reason = rng.choice(session.servers), None
    for _ in range(steps):
        before = state
        try:
            kinds = s.NEXT[session.fed.config.mode]
            due = [d for d in session.up if state.phase in kinds and tag(d) is kinds[state.phase][0]]
            if rng.random() < 0.1:
                state, out = server.handle(state, Close(rng.choice(list(s.Phase))))
                list(out)
            else:
                state, _ = server.handle(state, event(rng, session.up, due))
            assert isinstance(state, ServerState)
            server.awaited(state)
        except Abort as abort:
            reason, state = abort.reason, abort.state
            assert state is before or state == ServerState(s.Phase.ABORTED, before.session, before.invite)
    return reason


@cache
def tag(data: bytes) -> type:
    return type(wire.read_body(wire.read_envelope(data, 1 << 30), wire.Message))


def fuzz(num_sequences: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    pools = [pool(4, "active"), pool(4, "curious"), pool(70, "active")]
    seen: Counter[str] = Counter()
    for _ in range(num_sequences):
        session = rng.choices(pools, [10, 10, 1])[0]
        player = rng.choice([fuzz_client, fuzz_server])
        reason = player(rng, session, rng.randrange(1, 5))
        seen[f"{player.__name__}: {reason.name if reason else 'went on'}"] += 1
    return seen


def test_fuzzed_sequences() -> None:
    seen = fuzz(1500, 0)
    for name in ("MALFORMED", "UNEXPECTED", "BAD_SIGNATURE", "WRONG_SESSION"):
        assert seen[f"fuzz_server: {name}"], seen
    for name in ("MALFORMED", "UNEXPECTED", "BAD_SIGNATURE", "BAD_ROSTER", "BAD_SHARE", "BAD_VECTOR"):
        assert seen[f"fuzz_client: {name}"], seen


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_sequences() -> None:
    seen = fuzz(100_000, 1)
    assert seen.total() == 100_000
    print(seen)
