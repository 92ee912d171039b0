"""Additive shares for several servers, of which one at least keeps its own to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Range
from atoll.secagg.masks import Mask, apply
from atoll.secagg.scheme import Message, Outcome, Player, Scheme, Session, Stage, batches

SEED = 32
NUMBER = 8
"""Bytes of a client's number in front of what it says."""


def additive(servers: Annotated[int, Range(2, 1000, hint="one server would see every vector")] = 2) -> Scheme:
    """Split each vector into shares that look random and add up to it, one for each of several servers.

    All servers but the first get a seed of 32 bytes, which they stretch; the first gets the vector minus all of that
    (compare Corrigan-Gibbs and Boneh 2017, arXiv:1703.06255, appendix I). A client sends the large share last, so that
    whoever is in the first server's sum is known to the others. Each server adds up its shares, and only the sums of
    shares are put together. Nothing is hidden if all servers collude; clients cannot make anything fail or open.
    """

    def check(num_clients: int) -> None:
        if num_clients < 2:
            raise PlanError(f"a sum of {num_clients} clients hides nothing: ask at least 2")

    def play(session: Session, stage: Stage) -> Outcome:
        seeds: dict[int, bytes] = {}  # what the other servers hold
        total_L = np.zeros(session.length, session.encoding.dtype)
        survivors: list[int] = []
        up = 0
        with stage(lambda: _player(session, servers - 1)) as ask:
            for step in ("seeds", "input"):
                told = (Message(client, step.encode()) for client in _speaking(session, step))
                for messages in batches(told):
                    for answer in ask(messages):
                        up += len(answer)
                        client, data = int.from_bytes(answer[:NUMBER], "little"), answer[NUMBER:]
                        if step == "seeds":
                            seeds[client] = data
                        elif client in seeds:
                            total_L += np.frombuffer(data, session.encoding.dtype)
                            survivors.append(client)
        if len(survivors) < session.min_survivors:
            why = f"{len(survivors)} clients are left, at least {session.min_survivors} are needed; ask more"
            return Outcome(None, (), up, 0, why)
        for number in range(servers - 1):
            apply(total_L, [Mask(seeds[client][SEED * number :][:SEED], True) for client in survivors])
        return Outcome(total_L, tuple(sorted(survivors)), up, 0)

    return Scheme(play, ("seeds", "input"), 1, check)


def _speaking(session: Session, step: str) -> Iterator[int]:
    """Who is not lost yet at a step."""
    gone = ("seeds",) if step == "seeds" else ("seeds", "input")
    return (client for client in session.clients if session.silent.get(client) not in gone)


def _player(session: Session, num_seeds: int) -> Player:
    kept: dict[int, bytes] = {}

    def play(messages: list[Message]) -> Iterator[bytes]:
        for client, step in messages:
            number = client.to_bytes(NUMBER, "little")
            if step == b"seeds":
                kept[client] = os.urandom(SEED * num_seeds)
                yield number + kept[client]
            else:
                share_L, seeds = session.vector(client).copy(), kept.pop(client)
                apply(share_L, [Mask(seeds[SEED * place :][:SEED], False) for place in range(num_seeds)])
                yield number + share_L.tobytes()

    return play
