"""A chain of signed records: each holds the hash of the one before, so that none can be changed, dropped or moved.

A record is one line of canonical JSON (keys sorted, no spaces). Its hash is SHA-256 of that line without the signature;
the signature is the server's Ed25519 on the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.ledger.signing import holds

NOTHING = "0" * 64
"""The previous hash of the first record."""
START, END = "start", "end"
"""Kinds of the first record, whose body names the server's public key, and of the last one."""
BROADCAST, COMMIT, ABANDON = "broadcast", "commit", "abandon"
"""Kinds of records in between: a version is sent to clients, a version is committed, an attempt is abandoned."""
OPERATOR = "@operator"
"""What the ledger of the operator's actions is called: no run has such a name."""
ACTION = "action"
"""Kind of the records of the operator's ledger: what was done, and by whom."""


class Record(NamedTuple):
    """One record; `body` is plain data."""

    number: int
    previous: str
    kind: str
    body: Mapping[str, Any]

    def hash(self) -> str:
        """Return the hash that the next record holds of this one."""
        return hashlib.sha256(b"atoll ledger 1" + _canonical(self._asdict())).hexdigest()


class Head(NamedTuple):
    """The length of a ledger, and the hash of its last record."""

    length: int
    hash: str


EMPTY = Head(0, NOTHING)


class Fault(NamedTuple):
    """The first faulty record of a ledger."""

    number: int
    """Number of the record."""
    what: str
    """What is wrong, as the end of a sentence that begins with the record."""


def add(head: Head, kind: str, body: Mapping[str, Any], key: Ed25519PrivateKey) -> tuple[str, Head]:
    """Return the line of the next record, without a line break, and the new head."""
    record = Record(head.length, head.hash, kind, body)
    digest = record.hash()
    signature = key.sign(_signed_text(digest)).hex()
    line = _canonical({**record._asdict(), "signature": signature}).decode()
    return line, Head(head.length + 1, digest)


def start(body: Mapping[str, Any], key: Ed25519PrivateKey) -> tuple[str, Head]:
    """Return the first line of a ledger, which names the key that signs all records, and the new head."""
    return add(EMPTY, START, {**body, "server_key": key.public_key().public_bytes_raw().hex()}, key)


def read(line: str) -> tuple[Record, str]:
    """Return a record and its signature; raise ValueError if the line is not the canonical form of a record."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or _canonical(fields) != line.encode():
        raise ValueError("not in canonical form")
    signature = fields.pop("signature")
    record = Record(**fields)
    if (type(record.number), type(record.kind), type(record.body), type(signature)) != (int, str, dict, str):
        raise ValueError("a field has the wrong type")
    return record, signature


def verify(
    lines: Iterable[str], server_key: bytes | None = None, seen: Iterable[Head] = (), after: Head = EMPTY
) -> Fault | None:
    """Return the first record that was changed, dropped or moved, or None if all are as they were written.

    Without `server_key` the key is taken from the first record, which proves only that one key signed all. Records at
    the end can be dropped without a trace in the rest, so `seen` takes heads that others, such as clients, recorded
    earlier. To verify only the records `after` a head that is already verified, pass the key and no `seen`.
    """
    entries: list[tuple[Record, str]] = []
    for number, line in enumerate(lines, after.length):
        try:
            entries.append(read(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Fault(number, "is not a record: it was changed")
    if not entries:
        return Fault(0, "is missing: the ledger is empty")
    key = server_key or _named_key(entries[0][0])
    if key is None:
        return Fault(0, "names no key: it was changed, or the first records were dropped")
    numbers = [record.number for record, _ in entries]
    head = after
    for record, signature in entries:
        number, digest = head.length, record.hash()
        if not _holds(key, digest, signature):
            return Fault(number, "was changed: its signature is invalid")
        if record.number != number:
            if number in numbers[number - after.length :]:
                return Fault(number, f"was moved: record {record.number} is in its place")
            return Fault(number, f"was dropped: record {record.number} is in its place")
        if record.previous != head.hash:
            return Fault(number, "does not follow the one before: one of the two is from another ledger")
        head = Head(number + 1, digest)
    return next((fault for recorded in seen if (fault := _contradiction(entries, recorded)) is not None), None)


def _holds(key: bytes, digest: str, signature: str) -> bool:
    """Verify a signature in its canonical form of 128 lower-case hexadecimal digits."""
    try:
        data = bytes.fromhex(signature)
    except ValueError:
        return False
    return data.hex() == signature and holds(key, _signed_text(digest), data)


def _contradiction(entries: list[tuple[Record, str]], head: Head) -> Fault | None:
    """Return the record that contradicts a head that was recorded earlier, or None."""
    if head.length > len(entries):
        return Fault(len(entries), f"was dropped: {head.length} records were seen before")
    if head.length and entries[head.length - 1][0].hash() != head.hash:
        return Fault(head.length - 1, "is not the one that was seen before")
    return None


def _named_key(first: Record) -> bytes | None:
    """Return the public key that a first record names, or None if it names none."""
    try:
        key = bytes.fromhex(first.body["server_key"])
    except (KeyError, ValueError, TypeError):
        return None
    return key if first.kind == START and len(key) == 32 else None


def _signed_text(digest: str) -> bytes:
    return b"atoll ledger 1 record" + bytes.fromhex(digest)


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
