"""Homomorphic encryption: the server adds ciphertexts that it cannot decrypt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from atoll.core.errors import PlanError
from atoll.secagg.scheme import ClientHost, Message, Outcome, Responder, Scheme, Session, batches, check_several, no_sum

DEGREE, MODULI, SCALE = 8192, (60, 60), 2.0**27
"""128-bit security allows 218 bits of moduli at this degree; a sum below 2^31 fits 60 bits with this scale."""
SLOTS = DEGREE // 2
"""Number of values in one ciphertext."""
NUMBER = 8
"""Number of bytes of the client's number at the start of an answer."""


def ckks() -> Scheme:
    """Encrypt vectors with a key that clients share, and let the server add the ciphertexts (Cheon et al. 2017, CKKS).

    The values are the same integers as under masks, and the error of CKKS is far below 1/2, so that rounding gives the
    exact sum. One of the clients decrypts it. Drop-outs cost nothing; but one client that gives the shared key to the
    server reveals all updates, and the client that decrypts the sum is trusted. A vector takes 8 times its bytes.
    """

    def check(num_clients: int) -> None:
        check_several(num_clients)
        _library()

    def simulate(session: Session, host: ClientHost) -> Outcome:
        ts: Any = _library()
        clients_key = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULI))
        clients_key.global_scale = SCALE
        server_key = clients_key.copy()
        server_key.make_context_public()
        sums: list[Any] = []
        survivors: list[int] = []
        up = 0
        requests = (Message(client, b"") for client in session.clients if client not in session.silent)
        with host(lambda: _responder(session, clients_key)) as ask:
            for messages in batches(requests):
                for answer in ask(messages):
                    up += len(answer)
                    survivors.append(int.from_bytes(answer[:NUMBER], "little"))
                    parts = [ts.ckks_vector_from(server_key, part) for part in _ciphertexts(answer[NUMBER:])]
                    sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if len(survivors) < session.min_survivors:
            return no_sum(session, survivors, up)
        sealed = [ciphertext.serialize() for ciphertext in sums]
        decrypted = np.concatenate([ts.ckks_vector_from(clients_key, data).decrypt() for data in sealed])
        total_L = np.rint(decrypted[: session.length]).astype(np.int64).astype(session.encoding.dtype)
        return Outcome(
            total_L=total_L,
            survivors=tuple(sorted(survivors)),
            bytes_up=up + total_L.nbytes,
            bytes_down=sum(map(len, sealed)),
        )

    return Scheme(simulate=simulate, steps=("input",), counts_from=0, check=check, moduli=(32,))


def _responder(session: Session, key: Any) -> Responder:
    """Return a function that answers for clients with their encrypted vectors."""
    ts: Any = _library()

    def respond(messages: list[Message]) -> Iterator[bytes]:
        for client, _ in messages:
            signed_L = session.vector(client).view("<i4").astype(np.float64)
            answer = [client.to_bytes(NUMBER, "little")]
            for start in range(0, session.length, SLOTS):
                part = ts.ckks_vector(key, signed_L[start : start + SLOTS].tolist()).serialize()
                answer += [len(part).to_bytes(4, "little"), part]
            yield b"".join(answer)

    return respond


def _ciphertexts(data: bytes) -> Iterator[bytes]:
    """Yield the ciphertexts of a message, each of which has its length in front."""
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
