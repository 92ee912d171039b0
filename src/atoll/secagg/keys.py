"""Keys of one session: X25519 agreements, HKDF, and shares sealed for one receiver."""

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
    """The X25519 public key of 32 private bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, own: bytes, other: bytes, session: bytes, purpose: bytes) -> bytes:
    """The key that two clients share for one purpose in one session; `own` and `other` are their public keys.

    HKDF-SHA256 of the agreed point, salted by the session, bound to the purpose and both public keys.
    """
    try:
        point = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise Abort(
            Reason.BAD_KEY, "a public key of low order, with which no secret can be agreed; drop its owner"
        ) from error
    return HKDF(SHA256(), 32, session, purpose + b"".join(sorted((own, other)))).derive(point)


def own_mask_seed(secret: bytes, session: bytes) -> bytes:
    """The seed of a client's own mask."""
    return HKDF(SHA256(), 32, session, b"own mask").derive(secret)


def commitment(secret: bytes, session: bytes) -> bytes:
    """A hash that binds a client to the secret of its own mask, and says nothing of 32 random bytes."""
    return hashlib.sha256(b"atoll secagg 1 commitment" + session + secret).digest()


def same(left: bytes, right: bytes) -> bool:
    """Whether two strings are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(left, right)


def seal(channel: bytes, session: bytes, sender: int, receiver: int, plain: bytes) -> bytes:
    """Encrypt for one receiver. A channel's key serves one message each way, so the sender can be the nonce."""
    return AESGCM(channel).encrypt(_nonce(sender), plain, _route(session, sender, receiver))


def unseal(channel: bytes, session: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """Decrypt what `seal` gave the same sender and receiver in the same session."""
    try:
        return AESGCM(channel).decrypt(_nonce(sender), sealed, _route(session, sender, receiver))
    except InvalidTag as error:
        raise Abort(
            Reason.BAD_SHARE,
            f"shares of client {sender} that were not sealed for client {receiver}; start a new attempt",
        ) from error


def _nonce(sender: int) -> bytes:
    return struct.pack("<Qxxxx", sender)


def _route(session: bytes, sender: int, receiver: int) -> bytes:
    return session + struct.pack("<QQ", sender, receiver)
