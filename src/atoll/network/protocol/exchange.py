"""Messages of a session inside a task: two ordered streams of byte strings, one up and one down, in parts of a chunk.

Both sides number the messages of each stream from 0. What a message says is for the machines of the two sides; here
it is bytes. A request carries a part of one message up, or none, and may wait for a part of a message down, so that
as many messages are on their way as there are requests. A client that was killed asks for the stream down from 0
again, and sends nothing that the server says it has.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.network.protocol.messages import MAX_WAIT, Message, ObjectName, Signature
from atoll.network.protocol.objects import CHUNK

NONE = -1
"""The number of no message."""
SESSION_BYTES = 16
"""Random bytes in the name of a session."""
MAX_PARCEL = CHUNK + 64
"""Bytes of the largest answer."""
MAX_MESSAGES = 1 << 40
Session = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Number = Annotated[int, Meta(ge=NONE, le=MAX_MESSAGES)]
PartNumber = Annotated[int, Meta(ge=0, le=1 << 20)]


class SessionPart(Message, frozen=True):
    """What the body of a request is a part of, and what its answer should be."""

    session: Session
    """The name in the order; a server that was started again gives another, and the session begins anew."""
    number: Number = NONE
    """Number of the message whose part the body is; -1 if there is none."""
    part: PartNumber = 0
    parts: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    cause: Annotated[int, Meta(ge=0, le=MAX_MESSAGES)] = 0
    """Number of the server's message in answer to which the message is sent."""
    want: Number = NONE
    """Number of the server's message of which the answer brings a part; -1 for none."""
    want_part: PartNumber = 0
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = 0.0
    """Seconds that the answer may take; without a part in time it is empty."""


class Parcel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer: a part of a message down, as msgpack."""

    taken: Annotated[int, Meta(ge=0, le=MAX_MESSAGES)]
    """How many messages of the client are complete here, one after another from 0."""
    parts: Annotated[int, Meta(ge=0, le=1 << 20)]
    """Parts of the message that was asked for; 0 if it is not there yet."""
    data: Annotated[bytes, Meta(max_length=CHUNK)]


class SessionEnd(Message, frozen=True):
    """The end of a client's session: what was exchanged, signed, or why the client leaves it.

    The signature covers `update_text` with the name of the session's transcript as that of the update.
    """

    session: Session
    transcript: ObjectName | None = None
    num_samples: Annotated[int, Meta(ge=1, le=1 << 53)] = 1
    loss: float | None = None
    """Mean training loss, where the client has the labels."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    signature: Signature | None = None
    broadcast: ObjectName | None = None
    """The name of the order's `model`."""
    reason: Annotated[str, Meta(max_length=1000)] = ""
    """Why the client leaves; "" if the session is whole."""
    not_finite: bool = False
    """Whether it leaves since a value was NaN or Inf."""


class Transcript:
    """Hash of the messages of a session in both directions; both sides make the same one."""

    def __init__(self) -> None:
        self._hashes = {"up": hashlib.sha256(), "down": hashlib.sha256()}
        self._counts = {"up": 0, "down": 0}
        self._bytes = {"up": 0, "down": 0}

    def add(self, way: str, data: bytes) -> None:
        """Add the next message of a direction, "up" or "down"."""
        self._hashes[way].update(len(data).to_bytes(8, "little"))
        self._hashes[way].update(data)
        self._counts[way] += 1
        self._bytes[way] += len(data)

    def describe(self) -> dict[str, list[int | str]]:
        """Return the number of messages, their bytes and their hash, for each direction."""
        return {
            way: [self._counts[way], self._bytes[way], self._hashes[way].copy().hexdigest()] for way in ("up", "down")
        }

    def name(self) -> str:
        """Return the name of the transcript: the SHA-256 of what describes it."""
        return transcript_name(self.describe())


def transcript_name(described: dict[str, list[int | str]]) -> str:
    """Return the name of a transcript of this description, so that anybody can check a ledger's.

    >>> transcript_name(Transcript().describe())[:16]
    'a61a704e3fa0ac0e'
    """
    text = json.dumps([described["up"], described["down"]], separators=(",", ":"))
    return hashlib.sha256(b"atoll transcript 1\0" + text.encode()).hexdigest()


def parts_of(data: bytes) -> list[memoryview]:
    """Cut a message into parts of a chunk; an empty one has one part."""
    whole = memoryview(data)
    return [whole[start : start + CHUNK] for start in range(0, len(data), CHUNK)] or [whole]


def num_parts(num_bytes: int) -> int:
    """Return how many parts a message of so many bytes has.

    >>> num_parts(0), num_parts(1 << 20), num_parts((1 << 20) + 1)
    (1, 1, 2)
    """
    return max(1, -(-num_bytes // CHUNK))


def read_parcel(data: bytes) -> Parcel:
    """Read an answer; msgspec.MsgspecError if it is none."""
    return msgspec.msgpack.decode(data, type=Parcel)
