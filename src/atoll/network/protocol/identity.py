"""Identities: Ed25519 keys in files, and signatures of requests that prevent replay.

A signature covers method, path, hash of the body, client, epoch of the session, counter and time. All of these are in
the head, so that a request is authenticated before its body is read. A session belongs to one process: a new session
ends the one before. Counters never repeat within a session.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import RunError
from atoll.ledger.signing import client_id as client_id
from atoll.ledger.signing import holds as holds

MAX_AGE = 300.0
"""Maximum difference in seconds between the time of a request and that of the server."""
WINDOW = 64
"""Counters that are further behind the largest are refused."""
BODY_HEADER = "atoll-body"
HEADERS = ("atoll-client", "atoll-epoch", "atoll-counter", "atoll-time", "atoll-signature", BODY_HEADER)
HEX = re.compile(r"[0-9a-f]*")


class Stamp(NamedTuple):
    """What authenticates a request, once."""

    client: str
    epoch: int
    counter: int
    time: int
    """Seconds since 1970."""
    signature: bytes = b""
    body: str = hashlib.sha256(b"").hexdigest()
    """SHA-256 of the body, in hexadecimal."""

    def headers(self) -> dict[str, str]:
        """Return the stamp as HTTP headers."""
        values = (self.client, str(self.epoch), str(self.counter), str(self.time), self.signature.hex(), self.body)
        return dict(zip(HEADERS, values, strict=True))


def read_stamp(headers: dict[str, str]) -> Stamp | None:
    """Parse the stamp of a request; None if a header is missing or malformed."""
    if any(name not in headers for name in HEADERS):
        return None
    client, *numbers, signature, body = (headers[name] for name in HEADERS)
    if any(not (number.isascii() and number.isdigit() and len(number) < 16) for number in numbers):
        return None
    if any(len(text) != size or not HEX.fullmatch(text) for text, size in ((client, 32), (signature, 128), (body, 64))):
        return None
    epoch, counter, time = map(int, numbers)
    stamp = Stamp(client=client, epoch=epoch, counter=counter, time=time, signature=bytes.fromhex(signature), body=body)
    canonical = stamp.headers() == {name: headers[name] for name in HEADERS}  # no other spelling passes
    return stamp if canonical else None


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the public key."""
    return key.public_key().public_bytes_raw()


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file atomically that only its owner can read; FileExistsError if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(path)
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def check_private(path: Path) -> None:
    """Refuse a secret file that others can read."""
    if path.stat().st_mode & 0o077:
        raise RunError(f"others can read the secret in {path}: run chmod 600 {path}")


def make_key(path: Path) -> Ed25519PrivateKey:
    """Make a private key, and write it to a new file that only its owner can read."""
    key = Ed25519PrivateKey.generate()
    try:
        write_secret(path, key.private_bytes_raw())
    except FileExistsError as error:
        raise RunError(f"there is a key in {path} already: keep it, or move it away to make another") from error
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key that `make_key` wrote."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise RunError(f"there is no key in {path}: make one with atoll enrol, or name the right --home") from error
    if len(raw) != 32:
        raise RunError(f"{path} holds {len(raw)} bytes, which is not a key: restore it, or enrol again")
    check_private(path)
    return Ed25519PrivateKey.from_private_bytes(raw)


def sign(key: Ed25519PrivateKey, stamp: Stamp, method: str, path: str, body: bytes) -> Stamp:
    """Sign a request: fill in the body's hash and the signature of its stamp."""
    stamp = stamp._replace(body=hashlib.sha256(body).hexdigest())
    return stamp._replace(signature=key.sign(_signed(stamp, method, path)))


def signed_by(public_key: bytes, stamp: Stamp, method: str, path: str) -> bool:
    """Return whether a stamp is signed with this key; its hash is still to be compared with the body."""
    return holds(public_key, _signed(stamp, method, path), stamp.signature)


class CounterWindow(NamedTuple):
    """The used counters of a session: the largest, and a bit for each of the last WINDOW."""

    largest: int = 0
    bits: int = 0

    def with_counter(self, counter: int) -> CounterWindow | None:
        """Return the window with a counter marked as used; None if it was used before, or is too old.

        >>> CounterWindow().with_counter(3).with_counter(1)
        CounterWindow(largest=3, bits=5)
        >>> CounterWindow(largest=3, bits=5).with_counter(3) is None
        True
        """
        if counter > self.largest:
            shifted = self.bits << min(counter - self.largest, WINDOW)
            return CounterWindow(counter, (shifted | 1) & ((1 << WINDOW) - 1))
        place = self.largest - counter
        if place >= WINDOW or self.bits >> place & 1 or counter < 1:
            return None
        return self._replace(bits=self.bits | 1 << place)


def _signed(stamp: Stamp, method: str, path: str) -> bytes:
    parts = (method, path, stamp.body, stamp.client, str(stamp.epoch), str(stamp.counter), str(stamp.time))
    return ("atoll request 1\n" + "\n".join(parts)).encode()


def token_hash(token: str) -> str:
    """Return the hash under which a store keeps a token."""
    return hashlib.sha256(b"atoll token 1" + token.encode()).hexdigest()


def enrolment(token: str, name: str, key: bytes) -> bytes:
    """Return what a client signs to enrol."""
    return b"\0".join([b"atoll enrolment 1", token_hash(token).encode(), name.encode(), key])


def session_request(client: str, nonce: str) -> bytes:
    """Return what a client signs to begin a session."""
    return b"\0".join([b"atoll session 1", client.encode(), nonce.encode()])
