"""Take the masks off a sum: rebuild the secrets that the survivors opened, and remove what they stand for.

Of a survivor its own mask goes; of a client that shared but sent no vector, the masks that its neighbours added for it.
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


class Opened(NamedTuple):
    """What is known at the end. N clients, by their place in the roster."""

    session: bytes
    graph: Graph
    records: list[bytes]
    shared: np.ndarray
    """(N,), who shared its secrets."""
    survived: np.ndarray
    """(N,), whose vector is in the sum."""
    reveals: Mapping[int, bytes]
    """For each client that opened shares: one of each neighbour that shared, in ascending order."""


class Pieces(NamedTuple):
    """Shares of one secret, with the numbers of their holders."""

    holders: list[int]
    shares: list[bytes]


def unmask(total: np.ndarray, opened: Opened) -> None:
    """Turn a masked sum into the sum, in place; Abort, before anything is opened, if a secret lacks shares."""
    pieces = _collect(opened)
    threshold = opened.graph.parameters.threshold
    for index in _needed(opened):
        if len(pieces[index].holders) < threshold:
            raise Abort(
                Reason.TOO_FEW,
                f"{len(pieces[index].holders)} clients opened a secret, {threshold} are needed; start a new attempt",
            )
    apply(total, _masks(opened, pieces))


def _needed(opened: Opened) -> list[int]:
    """Whose secrets are needed: survivors, and the lost who have a neighbour among them."""
    table = opened.graph.table()
    return np.flatnonzero(opened.survived | opened.shared & opened.survived[table].any(axis=1)).tolist()


def _collect(opened: Opened) -> list[Pieces]:
    """The first `threshold` shares of each secret, in the order of their holders."""
    params, table = opened.graph.parameters, opened.graph.table()
    pieces = [Pieces([], []) for _ in opened.records]
    for holder in sorted(opened.reveals):
        owners = opened.graph.holders(holder)
        owners = owners[opened.shared[owners]]
        before = holder if params.complete else (table[owners] < holder).sum(axis=1)  # holders with smaller numbers
        numbers = np.broadcast_to(before, owners.shape) + 1
        reveal = opened.reveals[holder]
        for at, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
            if len(pieces[owner].holders) < params.threshold:
                pieces[owner].holders.append(number)
                pieces[owner].shares.append(reveal[shamir.SHARE * at : shamir.SHARE * (at + 1)])
    return pieces


def _masks(opened: Opened, pieces: list[Pieces]) -> Iterator[Mask]:
    """What has to be added to the masked sum, one mask after another."""
    coefficients: dict[tuple[int, ...], list[int]] = {}
    for index in _needed(opened):
        holders = tuple(pieces[index].holders)
        if holders not in coefficients:
            coefficients[holders] = shamir.coefficients(holders)
        secret = shamir.combine(pieces[index].shares, coefficients[holders])
        if opened.survived[index]:
            yield _own_mask(opened, index, secret)
        else:
            yield from _pair_masks(opened, index, secret)


def _own_mask(opened: Opened, index: int, secret: bytes | None) -> Mask:
    client, advert, _ = read_record(opened.records[index])
    if secret is None or not keys.same(keys.commitment(secret, opened.session), advert.commitment):
        raise _false_share(client)
    return Mask(keys.own_mask_seed(secret, opened.session), False)


def _pair_masks(opened: Opened, index: int, secret: bytes | None) -> Iterator[Mask]:
    """Undo what each surviving neighbour added for a client that was lost."""
    client, advert, _ = read_record(opened.records[index])
    if secret is None or not keys.same(keys.public_key(secret), advert.mask_key):
        raise _false_share(client)
    private = X25519PrivateKey.from_private_bytes(secret)
    neighbours = opened.graph.neighbours(index)
    for other in neighbours[opened.survived[neighbours]].tolist():
        survivor, its_advert, _ = read_record(opened.records[other])
        seed = keys.agree(private, advert.mask_key, its_advert.mask_key, opened.session, b"mask")
        yield Mask(seed, survivor > client)


def _false_share(client: int) -> Abort:
    return Abort(Reason.BAD_SHARE, f"shares of client {client} do not give what it promised; start a new attempt")
