"""A server that wants to read one client's update, over the real machines: what it is told, and what it gets.

The server plays the rest of the cohort itself, with keys that it made up. Where the client takes them for others, the
sum without what the server added is the client's update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.test_client_secure_session import PLAN, Sum

from atoll.core.errors import RunError
from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.identity import public_bytes
from atoll.secagg import client_state, wire
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import Vector
from atoll.secagg.server import Close, Phase, Server

CURIOUS = PLAN.replace({"secagg.scheme": {"name": "pairwise", "server": "curious"}})


class Spy(Sum):
    """A server that plays clients 1 and 2 itself, and wants to see what client 0 adds."""

    def __init__(self, path: Path, plan: Plan, floors: Floors, *, peers_given: bool) -> None:
        super().__init__(path, plan)
        self.tasks = self.tasks[:1]
        self.victim = self.scripted.clients[0]
        self.victim._floors = floors
        self.victim._given_peers = dict(self.keys) if peers_given else None
        self.scripted.homes[0].peers({str(number): key for number, key in self.keys.items()})  # from honest times
        self.scripted.clients[1:] = []
        self.fakes = {number: Ed25519PrivateKey.generate() for number in (1, 2)}

    def train(self) -> None:
        """Ask the victim alone; it may refuse."""
        self.order(0)
        self._until(lambda: bool(self.server.ready or self.server.refusals))

    def registry(self) -> dict[int, bytes]:
        made_up = {number: public_bytes(key) for number, key in self.fakes.items()}
        return {**self.keys, **made_up, wire.SERVER: public_bytes(self.server.key)}

    def cohort(self) -> wire.Invite:
        """The invitation that the plan leads to, of the victim and the fakes."""
        self.tasks = [Task(number, 0, 0) for number in range(3)]
        return self.invite()

    def read(self, **changes: Any) -> np.ndarray | None:
        """What the victim added, or None if the session came to nothing."""
        invite = msgspec.structs.replace(self.cohort(), **changes)
        machine = Server(identity=self.server.key, registry=self.registry())
        state, out = machine.open(invite)
        players = {number: self._fake(number, invite) for number in self.fakes}
        states = {number: player.begin(invite.model) for number, player in players.items()}
        nothing = np.zeros(invite.config.length, invite.config.dtype)
        while state.phase is not Phase.DONE:
            messages = list(out)
            answers = self.exchange([each for each in messages if each.client == 0])
            if not answers:
                return None
            for number, data in messages:
                if number in players:
                    states[number], said = players[number].handle(states[number], data)
                    if states[number].phase is client_state.Phase.READY:
                        states[number], said = players[number].handle(states[number], Vector(nothing))
                    answers += said
            for answer in answers:
                state, _ = machine.handle(state, answer)
            state, out = machine.handle(state, Close(state.phase))
        return machine.result(state)

    def _fake(self, number: int, invite: wire.Invite) -> Client:
        return Client(
            client=number,
            identity=self.fakes[number],
            server_key=public_bytes(self.server.key),
            once=in_memory(),
            registry=self.registry(),
            floors=client_state.Floors(mode=invite.config.mode),
        )

    def alone(self) -> np.ndarray:
        """What client 0 adds, found without any mask."""
        self.tasks, both = self.tasks[:1], self.tasks
        try:
            return self.expected()
        finally:
            self.tasks = both

    def exchange(self, messages: Any) -> list[bytes]:
        """Speak to the victim, unless it has refused the whole run."""
        return [] if self.server.refusals else super().exchange(messages)


SPIED: dict[str, tuple[Floors, bool, str]] = {
    "a floor": (Floors(secagg=True), False, "floors.secagg this client asks for active"),
    "a floor and keys": (Floors(secagg=True), True, "floors.secagg this client asks for active"),
    "keys": (Floors(), True, "--peers this client asks for active"),
    "keys of honest times": (Floors(), False, "client 1 did not sign what the server says"),
}


@pytest.mark.parametrize("kind", SPIED)
def test_a_plan_that_trusts_the_server_lets_nobody_read_an_update(tmp_path: Path, kind: str) -> None:
    floors, peers_given, says = SPIED[kind]
    spy = Spy(tmp_path, CURIOUS, floors, peers_given=peers_given)
    with spy.scripted.stack:
        spy.train()
        total = spy.read()
        if total is not None:
            raise AssertionError(f"read, {np.count_nonzero(total != spy.alone())} of {total.size} values are not right")
    assert says in spy.refusal()


def test_an_invitation_cannot_say_that_the_server_is_trusted(tmp_path: Path) -> None:
    spy = Spy(tmp_path, PLAN, Floors(), peers_given=False)
    with spy.scripted.stack:
        spy.train()
        config = msgspec.structs.replace(spy.cohort().config, mode="curious")
        with pytest.raises(RunError, match="do not trust this server"):
            spy.read(config=config)
