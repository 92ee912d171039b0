"""A chain of signed records: each holds the hash of the one before, so that none can be changed, dropped or moved.

A record is one line of JSON in one spelling only (keys sorted, no spaces). Its hash is SHA-256 of that line without the
signature; the signature is the server's Ed25519 on the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.ledger.signing import holds

NOTHING = "0" * 64
"""What stands for the hash of a record before the first."""
START, END = "start", "end"
"""The kinds of the first record, whose body names the server's public key, and of the last one."""
BROADCAST, COMMIT, ABANDON = "broadcast", "commit", "abandon"
"""A version is sent to clients, a version is made, an attempt comes to nothing."""


class Record(NamedTuple):
    """One entry; `body` is plain data."""

    number: int
    previous: str
    kind: str
    body: Mapping[str, Any]

    def hash(self) -> str:
        """The name by which the next record knows this one."""
        return hashlib.sha256(b"atoll ledger 1" + _plain(self._asdict())).hexdigest()


class Head(NamedTuple):
    """The last record that somebody has seen: how many there are, and its hash."""

    length: int
    hash: str


EMPTY = Head(0, NOTHING)


class Fault(NamedTuple):
    """What is wrong with a ledger, and from which record on."""

    number: int
    what: str


def add(head: Head, kind: str, body: Mapping[str, Any], key: Ed25519PrivateKey) -> tuple[str, Head]:
    """The line of the next record, without a line break, and the new head."""
    record = Record(head.length, head.hash, kind, body)
    digest = record.hash()
    signature = key.sign(_signed(digest)).hex()
    line = _plain({**record._asdict(), "signature": signature}).decode()
    return line, Head(head.length + 1, digest)


def start(body: Mapping[str, Any], key: Ed25519PrivateKey) -> tuple[str, Head]:
    """The first line of a ledger; it names the key that signs all others."""
    return add(EMPTY, START, {**body, "server_key": key.public_key().public_bytes_raw().hex()}, key)


def read(line: str) -> tuple[Record, str]:
    """A record and its signature; ValueError where the line is not one, or is not spelt as `add` spells it."""
    found = json.loads(line)
    if not isinstance(found, dict) or _plain(found) != line.encode():
        raise ValueError("another spelling")
    signature = found.pop("signature")
    record = Record(**found)
    if (type(record.number), type(record.kind), type(record.body), type(signature)) != (int, str, dict, str):
        raise ValueError("another type")
    return record, signature


def verify(
    lines: Iterable[str], server_key: bytes | None = None, seen: Iterable[Head] = (), after: Head = EMPTY
) -> Fault | None:
    """The first record that was changed, dropped or moved, or None if all are as they were written.

    Without `server_key` the key is taken from the first record, which proves only that one key signed all. Records at
    the end can be dropped without a trace in the rest: `seen` holds heads that somebody noted, such as clients. Who has
    verified the records up to a head gives those that come `after` it, with the key and without `seen`.
    """
    entries: list[tuple[Record, str]] = []
    for place, line in enumerate(lines, after.length):
        try:
            entries.append(read(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Fault(place, "is not a record: it was changed")
    if not entries:
        return Fault(0, "is missing: the ledger is empty")
    key = server_key or _named_key(entries[0][0])
    if key is None:
        return Fault(0, "names no key: it was changed, or the first records were dropped")
    numbers = [record.number for record, _ in entries]
    head = after
    for record, signature in entries:
        place, digest = head.length, record.hash()
        if not _holds(key, digest, signature):
            return Fault(place, "was changed: its signature does not hold")
        if record.number != place:
            if place in numbers[place - after.length :]:
                return Fault(place, f"was moved: record {record.number} stands in its place")
            return Fault(place, f"was dropped: record {record.number} stands in its place")
        if record.previous != head.hash:
            return Fault(place, "does not follow the one before: one of the two is from another ledger")
        head = Head(place + 1, digest)
    return next((fault for noted in seen if (fault := _unlike(entries, noted)) is not None), None)


def _holds(key: bytes, digest: str, signature: str) -> bool:
    """Check a signature in its one spelling: 128 lower-case hexadecimal digits."""
    try:
        found = bytes.fromhex(signature)
    except ValueError:
        return False
    return found.hex() == signature and holds(key, _signed(digest), found)


def _unlike(entries: list[tuple[Record, str]], head: Head) -> Fault | None:
    """What speaks against a head that somebody noted."""
    if head.length > len(entries):
        return Fault(len(entries), f"was dropped: somebody has seen {head.length} records")
    if head.length and entries[head.length - 1][0].hash() != head.hash:
        return Fault(head.length - 1, "is not the one that somebody has seen")
    return None


def _named_key(first: Record) -> bytes | None:
    try:
        found = bytes.fromhex(first.body["server_key"])
    except (KeyError, ValueError, TypeError):
        return None
    return found if first.kind == START and len(found) == 32 else None


def _signed(digest: str) -> bytes:
    return b"atoll ledger 1 record" + bytes.fromhex(digest)


def _plain(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
