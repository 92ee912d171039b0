"""What parties say to each other while they join records, and the bytes of it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.alignment.curve import POINT, AlignmentError

VERSION = 1
OVERHEAD = 1024
"""Bytes that a message may take beside its points."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both sides must say alike: how ids are compared, and whether more than their number is learnt."""

    version: int = VERSION
    rule: str
    count_only: bool


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """The first message, both ways: the terms, how many ids there are, and a public key for this session."""

    terms: Terms
    num_ids: int
    public_key: bytes
    salt: bytes = b""
    """What ids are salted with; from the asking side alone."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="request"):
    """The asking side's ids, as points."""

    points: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="answer"):
    """The answering side's ids as points, and the asking side's with both exponents."""

    own: bytes
    asked: bytes


class Chosen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chosen"):
    """The common rows in their order, and the key for their pseudonyms: encrypted for one party."""

    sealed: bytes


class Committed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="committed"):
    """A hash of the rows in the order in which a party has laid them."""

    tag: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="done"):
    """The end: all parties have the same rows, or, where only their number was wanted, it is known."""


Message = Hello | Request | Answer | Chosen | Committed | Done
Kind = TypeVar("Kind", bound=msgspec.Struct)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return msgspec.msgpack.encode(message)


def most_bytes(num_points: int) -> int:
    """Return how long a message that holds so many points may be."""
    return OVERHEAD + POINT * num_points


def decode(data: bytes, due: type[Kind], num_points: int, who: str) -> Kind:
    """Read the message that is due and may hold so many points; another one, or a longer one, is an error."""
    most = most_bytes(num_points)
    if len(data) > most:
        raise AlignmentError(
            f"{who} sent {len(data):,} bytes, at most {most:,} are due by the number of ids that it told of: let it "
            "tell the right number"
        )
    try:
        message = msgspec.msgpack.decode(data, type=Message)
    except msgspec.MsgspecError as error:
        raise AlignmentError(
            f"{who} sent what is no message of an alignment ({str(error)!a}): let it run atoll align"
        ) from error
    if not isinstance(message, due):
        raise AlignmentError(
            f"{who} sent {type(message).__name__.lower()} while {due.__name__.lower()} is due: begin anew, and let all "
            "run the same release"
        )
    return message
