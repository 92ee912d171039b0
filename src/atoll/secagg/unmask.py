"""Remove the masks from a sum: rebuild secrets from the revealed shares, and subtract the masks that they determine.

For a survivor that is its own mask; for a client that sent shares but no vector, the masks that its neighbours share
with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.secagg import keys, shamir
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.graph import Graph
from atoll.secagg.masks import Mask, apply
from atoll.secagg.wire import read_record


class Revealed(NamedTuple):
    """Inputs of the unmasking. N clients, by their place in the roster."""

    session: bytes
    graph: Graph
    records: list[bytes]
    """Adverts of all clients."""
    shared: np.ndarray
    """(N,), whether a client sent shares of its secrets."""
    survived: np.ndarray
    """(N,), whether a client's vector is in the sum."""
    reveals: Mapping[int, bytes]
    """Client -> the shares that it revealed: one for each neighbour that sent shares, in ascending order."""


class SecretShares(NamedTuple):
    """Shares of one secret, with the numbers of their holders."""

    holders: list[int]
    shares: list[bytes]


def unmask(total: np.ndarray, revealed: Revealed) -> None:
    """Remove the masks from a sum in place; raise Abort, before any change, if a secret lacks shares."""
    secrets = _collect(revealed)
    threshold = revealed.graph.parameters.threshold
    for index in _needed(revealed):
        if len(secrets[index].holders) < threshold:
            raise Abort(
                Reason.TOO_FEW,
                f"{len(secrets[index].holders)} clients revealed a share of a secret, {threshold} are needed; start a "
                "new attempt",
            )
    apply(total, _masks(revealed, secrets))


def _needed(revealed: Revealed) -> list[int]:
    """Return the clients whose secrets are needed: survivors, and lost clients with a surviving neighbour."""
    table = revealed.graph.table()
    return np.flatnonzero(revealed.survived | revealed.shared & revealed.survived[table].any(axis=1)).tolist()


def _collect(revealed: Revealed) -> list[SecretShares]:
    """Return the first `threshold` shares of each secret, by ascending holders."""
    params, table = revealed.graph.parameters, revealed.graph.table()
    secrets = [SecretShares([], []) for _ in revealed.records]
    for holder in sorted(revealed.reveals):
        owners = revealed.graph.holders(holder)
        owners = owners[revealed.shared[owners]]
        before = holder if params.complete else (table[owners] < holder).sum(axis=1)  # holders with smaller numbers
        numbers = np.broadcast_to(before, owners.shape) + 1
        reveal = revealed.reveals[holder]
        for at, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
            if len(secrets[owner].holders) < params.threshold:
                secrets[owner].holders.append(number)
                secrets[owner].shares.append(reveal[shamir.SHARE * at : shamir.SHARE * (at + 1)])
    return secrets


def _masks(revealed: Revealed, secrets: list[SecretShares]) -> Iterator[Mask]:
    """Yield the masks that turn the masked sum into the sum."""
    coefficients: dict[tuple[int, ...], list[int]] = {}
    for index in _needed(revealed):
        holders = tuple(secrets[index].holders)
        if holders not in coefficients:
            coefficients[holders] = shamir.coefficients(holders)
        secret = shamir.combine(secrets[index].shares, coefficients[holders])
        if revealed.survived[index]:
            yield _own_mask(revealed, index, secret)
        else:
            yield from _pair_masks(revealed, index, secret)


def _own_mask(revealed: Revealed, index: int, secret: bytes | None) -> Mask:
    """Return the mask that removes a survivor's own one."""
    client, advert, _ = read_record(revealed.records[index])
    if secret is None or not keys.same(keys.commitment(secret, revealed.session), advert.commitment):
        raise _wrong_secret(client)
    return Mask(keys.own_mask_seed(secret, revealed.session), False)


def _pair_masks(revealed: Revealed, index: int, secret: bytes | None) -> Iterator[Mask]:
    """Yield the masks that remove what the surviving neighbours added for a lost client."""
    client, advert, _ = read_record(revealed.records[index])
    if secret is None or not keys.same(keys.public_key(secret), advert.mask_key):
        raise _wrong_secret(client)
    private = X25519PrivateKey.from_private_bytes(secret)
    neighbours = revealed.graph.neighbours(index)
    for other in neighbours[revealed.survived[neighbours]].tolist():
        survivor, its_advert, _ = read_record(revealed.records[other])
        seed = keys.agree(private, advert.mask_key, its_advert.mask_key, revealed.session, b"mask")
        yield Mask(seed, survivor > client)


def _wrong_secret(client: int) -> Abort:
    return Abort(
        Reason.BAD_SHARE, f"the shares of client {client} do not match its commitment or key; start a new attempt"
    )
