"""Keys of one session: X25519 agreements, HKDF, and shares encrypted for one receiver."""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.secagg.aborts import Abort, Reason


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private key of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, own: bytes, other: bytes, session: bytes, purpose: bytes) -> bytes:
    """Return the common key of two clients for one purpose in one session; `own` and `other` are their public keys.

    HKDF-SHA256 of the agreed point, salted with the session, bound to the purpose and both public keys.
    """
    try:
        point = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise Abort(
            Reason.BAD_KEY, "a public key has low order, so that no secret can be agreed; exclude its owner"
        ) from error
    return HKDF(SHA256(), 32, session, purpose + b"".join(sorted((own, other)))).derive(point)


def own_mask_seed(secret: bytes, session: bytes) -> bytes:
    """Return the seed of a client's own mask."""
    return HKDF(SHA256(), 32, session, b"own mask").derive(secret)


def commitment(secret: bytes, session: bytes) -> bytes:
    """Return a hash that commits a client to the secret of its own mask without revealing it."""
    return hashlib.sha256(b"atoll secagg 1 commitment" + session + secret).digest()


def same(left: bytes, right: bytes) -> bool:
    """Return whether two strings are equal, in constant time."""
    return hmac.compare_digest(left, right)


def seal(channel: bytes, session: bytes, sender: int, receiver: int, plain: bytes) -> bytes:
    """Encrypt for one receiver. A channel's key serves one message each way, so that the sender can be the nonce."""
    return AESGCM(channel).encrypt(_nonce(sender), plain, _route(session, sender, receiver))


def unseal(channel: bytes, session: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """Decrypt the result of `seal` for the same session, sender and receiver."""
    try:
        return AESGCM(channel).decrypt(_nonce(sender), sealed, _route(session, sender, receiver))
    except InvalidTag as error:
        raise Abort(
            Reason.BAD_SHARE,
            f"client {receiver} cannot decrypt the shares of client {sender}; start a new attempt",
        ) from error


def _nonce(sender: int) -> bytes:
    return struct.pack("<Qxxxx", sender)


def _route(session: bytes, sender: int, receiver: int) -> bytes:
    return session + struct.pack("<QQ", sender, receiver)
