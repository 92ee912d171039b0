"""What a message is in when it travels as a file: who sends it to whom, which file it follows, and a seal over all.

A file is `MAGIC`, the seal (an HMAC under a key of the secret that the parties agreed on) and a `Letter`. Two parties
write in turns, and each letter holds the hash of the file before it, so that none fits into another session or place.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

import msgspec

MAGIC = b"atoll alignment 1\n"
SEAL = 32
BESIDE = 1024
"""Bytes that a file may take beside its message."""
FILE = re.compile(r"([\w-]+)-to-([\w-]+)-([0-9]{3,})\.atoll")
STOPPED = "-stopped.atoll"


class Letter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message on its way between two parties."""

    sender: str
    receiver: str
    number: int
    """1 for the first letter of its sender to its receiver."""
    follows: bytes
    """Hash of the file before it, which the receiver wrote; empty in the first of all."""
    message: bytes


class Way(NamedTuple):
    """What the name of a file says."""

    sender: str
    receiver: str
    number: int


def seal_key(secret: bytes) -> bytes:
    """Return the key of seals; without a secret it is known to all, and a seal finds accidents alone."""
    return hmac.digest(secret, MAGIC, "sha256")


def sealed(letter: Letter, key: bytes) -> bytes:
    """Return a letter as a file."""
    data = msgspec.msgpack.encode(letter)
    return MAGIC + hmac.digest(key, data, "sha256") + data


def opened(file: bytes, key: bytes) -> Letter | None:
    """Return the letter in a file; None where the seal is not of this key, or there is no letter."""
    start, data = len(MAGIC) + SEAL, memoryview(file)[len(MAGIC) + SEAL :]
    if not hmac.compare_digest(file[:start], MAGIC + hmac.digest(key, data, "sha256")):
        return None
    try:
        return msgspec.msgpack.decode(data, type=Letter)
    except msgspec.MsgspecError:
        return None


def hash_of(file: bytes) -> bytes:
    """Return what the next letter names a file by."""
    return hashlib.sha256(file).digest()


def file_name(way: Way) -> str:
    """Return the name of a file.

    >>> file_name(Way("bank", "shop", 1))
    'bank-to-shop-001.atoll'
    """
    return f"{way.sender}-to-{way.receiver}-{way.number:03}.atoll"


def way_of(name: str) -> Way | None:
    """Return what the name of a file says; None for another one.

    >>> way_of("bank-to-shop-2-001.atoll"), way_of("bank.csv")
    (Way(sender='bank', receiver='shop-2', number=1), None)
    """
    parts = FILE.fullmatch(name)
    return Way(parts[1], parts[2], int(parts[3])) if parts else None
