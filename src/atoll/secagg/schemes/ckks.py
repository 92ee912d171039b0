"""Homomorphic encryption: the server adds what it cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from atoll.core.errors import PlanError
from atoll.secagg.scheme import Message, Outcome, Player, Scheme, Session, Stage, batches

DEGREE, MODULI, SCALE = 8192, (60, 60), 2.0**27
"""128-bit security allows 218 bits of moduli at this degree; a sum below 2^31 fits 60 bits with this scale."""
SLOTS = DEGREE // 2
"""Values in one ciphertext."""
NUMBER = 8


def ckks() -> Scheme:
    """Encrypt vectors with a key that clients share, and let the server add the ciphertexts (Cheon et al. 2017, CKKS).

    The numbers are the same integers as under masks, and CKKS is exact to far less than a half, so that rounding gives
    their very sum. One of the clients opens it. Drop-outs cost nothing; but one client that shows the server the shared
    key opens everything, and the client that opens the sum is believed. A vector takes 8 times its bytes.
    """

    def check(num_clients: int) -> None:
        if num_clients < 2:
            raise PlanError(f"a sum of {num_clients} clients hides nothing: ask at least 2")
        _library()

    def play(session: Session, stage: Stage) -> Outcome:
        ts: Any = _library()
        clients_key = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULI))
        clients_key.global_scale = SCALE
        server_key = clients_key.copy()
        server_key.make_context_public()
        sums: list[Any] = []
        survivors: list[int] = []
        up = 0
        told = (Message(client, b"") for client in session.clients if client not in session.silent)
        with stage(lambda: _player(session, clients_key)) as ask:
            for messages in batches(told):
                for answer in ask(messages):
                    up += len(answer)
                    survivors.append(int.from_bytes(answer[:NUMBER], "little"))
                    parts = [ts.ckks_vector_from(server_key, part) for part in _cut(answer[NUMBER:])]
                    sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if len(survivors) < session.min_survivors:
            why = f"{len(survivors)} clients are left, at least {session.min_survivors} are needed; ask more"
            return Outcome(None, (), up, 0, why)
        sealed = [each.serialize() for each in sums]
        opened = np.concatenate([ts.ckks_vector_from(clients_key, each).decrypt() for each in sealed])
        total_L = np.rint(opened[: session.length]).astype(np.int64).astype(session.encoding.dtype)
        return Outcome(total_L, tuple(sorted(survivors)), up + total_L.nbytes, sum(map(len, sealed)))

    return Scheme(play, ("input",), 0, check, moduli=(32,))


def _player(session: Session, key: Any) -> Player:
    ts: Any = _library()

    def play(messages: list[Message]) -> Iterator[bytes]:
        for client, _ in messages:
            signed_L = session.vector(client).view("<i4").astype(np.float64)
            said = [client.to_bytes(NUMBER, "little")]
            for start in range(0, session.length, SLOTS):
                part = ts.ckks_vector(key, signed_L[start : start + SLOTS].tolist()).serialize()
                said += [len(part).to_bytes(4, "little"), part]
            yield b"".join(said)

    return play


def _cut(data: bytes) -> Iterator[bytes]:
    """The ciphertexts in a message, each with its length in front."""
    while data:
        size = int.from_bytes(data[:4], "little")
        yield data[4 : 4 + size]
        data = data[4 + size :]


def _library() -> Any:
    try:
        import tenseal
    except ImportError as error:
        raise PlanError('ckks needs TenSEAL: pip install "atoll[ckks]", or use secagg.scheme = "pairwise"') from error
    return tenseal
