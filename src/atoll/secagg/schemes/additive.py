"""Additive secret sharing among several servers, of which at least one does not collude."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from atoll.core.options import Range
from atoll.secagg.masks import Mask, apply
from atoll.secagg.scheme import ClientHost, Message, Outcome, Responder, Scheme, Session, batches, check_several, no_sum

SEED = 32
"""Number of bytes of a seed."""
NUMBER = 8
"""Number of bytes of the client's number at the start of an answer."""


def additive(servers: Annotated[int, Range(2, 1000, hint="one server would see every vector")] = 2) -> Scheme:
    """Split each vector into random-looking shares that add up to it, one for each of several servers.

    All servers but the first get a seed of 32 bytes, which they expand; the first gets the vector minus all expanded
    seeds (compare Corrigan-Gibbs and Boneh 2017, arXiv:1703.06255, appendix I). A client sends the large share last, so
    that the other servers know all clients in the first server's sum. Each server adds up its shares, and only the sums
    are combined. Nothing is hidden if all servers collude; clients can neither stop a sum nor open a share.
    """

    def simulate(session: Session, host: ClientHost) -> Outcome:
        seeds: dict[int, bytes] = {}  # held by the other servers
        total_L = np.zeros(session.length, session.encoding.dtype)
        survivors: list[int] = []
        up = 0
        with host(lambda: _responder(session, servers - 1)) as ask:
            for step in ("seeds", "input"):
                requests = (Message(client, step.encode()) for client in _active(session, step))
                for messages in batches(requests):
                    for answer in ask(messages):
                        up += len(answer)
                        client, data = int.from_bytes(answer[:NUMBER], "little"), answer[NUMBER:]
                        if step == "seeds":
                            seeds[client] = data
                        elif client in seeds:
                            total_L += np.frombuffer(data, session.encoding.dtype)
                            survivors.append(client)
        if len(survivors) < session.min_survivors:
            return no_sum(session, survivors, up)
        for number in range(servers - 1):
            apply(total_L, [Mask(seeds[client][SEED * number :][:SEED], True) for client in survivors])
        return Outcome(total_L=total_L, survivors=tuple(sorted(survivors)), bytes_up=up, bytes_down=0)

    return Scheme(simulate=simulate, steps=("seeds", "input"), counts_from=1, check=check_several)


def _active(session: Session, step: str) -> Iterator[int]:
    """Return the clients that still answer at a step."""
    lost_at = ("seeds",) if step == "seeds" else ("seeds", "input")
    return (client for client in session.clients if session.silent.get(client) not in lost_at)


def _responder(session: Session, num_seeds: int) -> Responder:
    """Return a function that answers for clients: first with seeds, then with the vector minus the expanded seeds."""
    kept: dict[int, bytes] = {}

    def respond(messages: list[Message]) -> Iterator[bytes]:
        for client, step in messages:
            number = client.to_bytes(NUMBER, "little")
            if step == b"seeds":
                kept[client] = os.urandom(SEED * num_seeds)
                yield number + kept[client]
            else:
                share_L, seeds = session.vector(client).copy(), kept.pop(client)
                apply(share_L, [Mask(seeds[SEED * place :][:SEED], False) for place in range(num_seeds)])
                yield number + share_L.tobytes()

    return respond
