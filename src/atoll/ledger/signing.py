"""Keys, signatures and hashes that server, clients and offline verifiers must compute alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def holds(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether an Ed25519 signature on some bytes was made with the private half of a key."""
    try:
        _key(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1 << 14)
def _key(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


def client_id(public_key: bytes) -> str:
    """Return the id of a client: the first 32 hexadecimal digits of the hash of its public key.

    >>> client_id(bytes(32))
    '66687aadf862bd776c8fc18b8e9f8e20'
    """
    return hashlib.sha256(public_key).hexdigest()[:32]


def update_text(
    run: str,
    attempt: int,
    version: int,
    name: str,
    num_samples: int,
    loss: float | None,
    weight: float,
    broadcast: str | None = None,
) -> bytes:
    """Return the bytes that a client signs when it delivers the update in the object `name`.

    `broadcast` names the object that it trained on; clients before version 2 of this text did not sign it. The ledger
    keeps the signature.
    """
    signed = [run, attempt, version, name, num_samples, loss, weight]
    if broadcast is None:
        return b"atoll update 1\0" + msgspec.json.encode(signed)
    return b"atoll update 2\0" + msgspec.json.encode([*signed, broadcast])


def plan_hash(plan: Mapping[str, Any]) -> str:
    """Return the hash of a plan in the form that clients receive, by which they check that it never changes."""
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(b"atoll plan 1\0" + text.encode()).hexdigest()
