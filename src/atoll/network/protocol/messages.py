"""What clients and server say to each other: JSON for control, content-addressed chunks for everything large.

Every connection is opened by the client. Version 1 of the protocol lives under /v1; a request says in the header
`atoll-protocol` which version it speaks. Fields that a receiver does not know are ignored, so that a version can grow;
bytes travel as base64. The endpoints that carry these messages are in `endpoints`; docs: docs/protocol.md.
"""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from atoll.ledger import signing

VERSION = 1
VERSION_HEADER = "atoll-protocol"
MAX_WAIT = 25.0
"""Seconds that a poll may wait."""
MAX_LINES = 200
"""Ledger lines in one answer."""
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
ClientId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
ObjectName = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
"""The length is said too: `$` alone would let a line break pass."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Message(msgspec.Struct, frozen=True):
    """What one side says, as JSON."""


A = TypeVar("A", bound=Message)


class Problem(Message, frozen=True):
    """Why a request was not served, and what to do.

    The status says what kind of problem it is. 401: begin a session. 409: another process has this client's session.
    410: nobody waits for this task any more. 426: another version of the protocol. 429 and 5xx: try again later.
    """

    error: str
    retry: float | None = None
    """Try again after so many seconds, whatever the status; else a 4xx is the last word on this request."""


class About(Message, frozen=True):
    """What anybody may know of a server."""

    protocols: tuple[int, ...]
    server_key: Key
    """What signs its ledgers."""
    time: int
    """Seconds since 1970."""


class Enrol(Message, frozen=True):
    """A client asks to be known; signed as `gate.enrolment` says."""

    token: Annotated[str, Meta(max_length=200)]
    name: Annotated[str, Meta(max_length=100)]
    key: Key
    signature: Signature


class Enrolled(Message, frozen=True):
    """The client is known, and waits for the operator's approval."""

    client: ClientId


class Challenge(Message, frozen=True):
    """A client wants to begin a session."""

    client: ClientId


class Nonce(Message, frozen=True):
    """What to sign for it."""

    nonce: Annotated[str, Meta(max_length=200)]


class Hello(Message, frozen=True):
    """A client begins a session; signed as `gate.session_request` says."""

    client: ClientId
    nonce: Annotated[str, Meta(max_length=200)]
    signature: Signature


class Welcome(Message, frozen=True):
    """The session, and who the client is here."""

    epoch: int
    number: int
    """Its number in plans."""
    name: str


class Poll(Message, frozen=True):
    """Is there work? The answer may take `wait` seconds; with 0 it comes at once."""

    num_samples: Annotated[int, Meta(ge=1, le=1 << 53)]
    """How many samples the client would train on, held-out ones included."""
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = MAX_WAIT
    attributes: dict[str, bool | float] = {}
    """What the device says of itself: idle, charging, unmetered, battery, memory."""
    busy: tuple[tuple[str, int], ...] = ()
    """Run and attempt of the orders that it works on already: these are left out of the answer."""
    ended: tuple[str, ...] = ()
    """Runs that it knows to be over: of others it is told at once, without waiting."""


class Ref(Message, frozen=True):
    """An object that can be had in chunks."""

    name: ObjectName
    num_bytes: Count


class News(Message, frozen=True):
    """What changed in a version since the one before, where differences are sent."""

    version: Count
    object: Ref


class Order(Message, frozen=True):
    """A task for this client."""

    run: str
    attempt: Count
    version: Count
    model: Ref
    """The broadcast of this version as a packed payload, whole and not compressed: the ledger names it."""
    share: float = 1.0
    work: float = 1.0
    clip: float | None = None
    encoded: Ref | None = None
    """The broadcast through the downlink's chain: who finds `model` by undoing that need not fetch it."""
    news: tuple[News, ...] = ()
    """Differences that lead to this version, oldest first: who knows the version before the first needs no `model`.

    The result has the name of `model` if it is right; who finds another takes `model`."""
    counted: int | None = None
    """The newest attempt of this run in which this client's update counted: what it remembered then holds."""
    seconds: float | None = None
    """How long the answer is waited for; for ever if unset."""
    secure: Ref | None = None
    """A message of secure aggregation that waits for an answer, in place of a task."""


class Orders(Message, frozen=True):
    """What there is to do. Who has nothing to do asks again after `retry` seconds, spread over `spread` more."""

    orders: tuple[Order, ...] = ()
    ended: tuple[str, ...] = ()
    """Runs that are over."""
    open: int = 0
    """How many runs are not over."""
    retry: float = 0.0
    spread: float = 1.0


class RunInfo(Message, frozen=True):
    """What a client must know of a run to agree to it. The plan is data: names from the catalogue, and numbers."""

    run: str
    plan: dict[str, Any]
    plan_hash: str
    num_clients: int
    """How many clients there are."""
    cohort: int
    """Of how many a version is made at least."""
    num_bytes: Count
    """Of the model, as it is sent whole."""
    max_samples: Count
    """How many samples the largest client has: what weights are shares of, where updates are added in secret."""
    epsilon: float | None = None
    """What the whole run may spend, where it is private."""
    peers: dict[str, Key] = {}
    """Everybody's public key by number, where updates are added in secret."""
    model: Ref | None = None
    """The parameters that the run ended with, once it is over."""


class Missing(Message, frozen=True):
    """Which chunks of an announced object the server does not have, by their hashes."""

    chunks: tuple[str, ...]


class Delivery(Message, frozen=True):
    """An update is on the server in chunks: count it. Signed as `update_text` says."""

    manifest: bytes
    num_samples: Annotated[int, Meta(ge=1, le=1 << 53)]
    loss: float | None
    """None if it is not a number, which JSON cannot say."""
    weight: float
    signature: Signature
    broadcast: ObjectName | None = None
    """The name of the order's `model`, which it was trained on; older clients do not say it."""


class Answer(Message, frozen=True):
    """An answer in secure aggregation is on the server in chunks."""

    manifest: bytes


class Delivered(Message, frozen=True):
    """The update is safe with the server. Whether it counted stands in the ledger."""

    object: ObjectName


class Refusal(Message, frozen=True):
    """The client will not do a task, and is not asked for a while."""

    reason: Annotated[str, Meta(max_length=1000)]
    whole_run: bool = False
    """Whether it takes no part in the run at all, such as where the plan is weaker than its floors."""


class Lines(Message, frozen=True):
    """Lines of a run's ledger, from the one asked for on; at most MAX_LINES at a time."""

    lines: tuple[str, ...]


class Done(Message, frozen=True):
    """Nothing more to say."""


def update_text(run: str, attempt: int, version: int, name: str, delivery: Delivery) -> bytes:
    """What a client signs when it delivers an update; the ledger keeps the signature."""
    return signing.update_text(
        run, attempt, version, name, delivery.num_samples, delivery.loss, delivery.weight, delivery.broadcast
    )


def read_message(data: bytes, kind: type[A]) -> A:
    """Read a message; bytes in it have one spelling, although base64 leaves bits at its end that decoders ignore.

    >>> read_message(b'{"manifest": "AA=="}', Answer)
    Answer(manifest=b'\\x00')
    >>> read_message(b'{"manifest": "AB=="}', Answer)
    Traceback (most recent call last):
    msgspec.ValidationError: manifest is not spelt as base64 spells it
    """
    found = msgspec.json.decode(data, type=kind)
    for name in found.__struct_fields__:
        value = getattr(found, name)
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, bytes) and base64.b64encode(each) not in data:
                raise msgspec.ValidationError(f"{name} is not spelt as base64 spells it")
    return found


def is_run_name(text: str) -> bool:
    """Whether a run may be called so.

    >>> is_run_name("mnist-2"), is_run_name("../x")
    (True, False)
    """
    return RUN_NAME.fullmatch(text) is not None
