"""Control messages between clients and server, as JSON; everything large travels in content-addressed chunks.

Every connection is opened by the client. Version 1 of the protocol lives under /v1; the header `atoll-protocol` of a
request names its version. Receivers ignore unknown fields, so that a version can grow; bytes travel as base64. The
endpoints that carry these messages are in `endpoints`; docs: docs/protocol.md.
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
"""Seconds that a poll may wait for its answer."""
MAX_LINES = 200
"""Ledger lines in one answer."""
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
ClientId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
ObjectName = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
"""The length is checked too: `$` alone matches before a line break."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Message(msgspec.Struct, frozen=True):
    """A control message."""


A = TypeVar("A", bound=Message)


class Problem(Message, frozen=True):
    """Why a request failed, and what to do.

    The status gives the kind of problem. 401: begin a session. 409: another process has this client's session.
    410: the task is closed. 426: another version of the protocol. 429 and 5xx: try again later.
    """

    error: str
    retry: float | None = None
    """Seconds after which to try again, whatever the status; without it, a 4xx is final."""


class About(Message, frozen=True):
    """Public facts about a server."""

    protocols: tuple[int, ...]
    server_key: Key
    """The public key that signs its ledgers."""
    time: int
    """Seconds since 1970."""


class Enrol(Message, frozen=True):
    """Request to enrol a client; the signature covers `identity.enrolment`."""

    token: Annotated[str, Meta(max_length=200)]
    name: Annotated[str, Meta(max_length=100)]
    key: Key
    signature: Signature


class Enrolled(Message, frozen=True):
    """The client is enrolled, and waits for the operator's approval."""

    client: ClientId


class Challenge(Message, frozen=True):
    """Request for a nonce, with which to begin a session."""

    client: ClientId


class Nonce(Message, frozen=True):
    """A nonce to sign."""

    nonce: Annotated[str, Meta(max_length=200)]


class Hello(Message, frozen=True):
    """Request to begin a session; the signature covers `identity.session_request`."""

    client: ClientId
    nonce: Annotated[str, Meta(max_length=200)]
    signature: Signature


class Welcome(Message, frozen=True):
    """A new session, and who the client is to this server."""

    epoch: int
    number: int
    """Its number in plans."""
    name: str


class Poll(Message, frozen=True):
    """Request for work; the answer may take `wait` seconds."""

    num_samples: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Number of samples of the client, held-out ones included."""
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = MAX_WAIT
    attributes: dict[str, bool | float] = {}
    """State of the device: idle, charging, unmetered, battery, memory."""
    busy: tuple[tuple[str, int], ...] = ()
    """Run and attempt of orders that are in work: the answer leaves them out."""
    ended: tuple[str, ...] = ()
    """Runs that the client knows to have ended: if there are others, the answer comes at once."""
    evaluates: bool = False
    """Whether the client takes orders to evaluate; older clients do not know them."""
    evaluates_in_secret: bool = False
    """Whether it takes them, but adds what it measures to secret sums only."""


class Ref(Message, frozen=True):
    """Name and size of an object that can be downloaded in chunks."""

    name: ObjectName
    num_bytes: Count


class News(Message, frozen=True):
    """The difference of a version to the one before, where the downlink sends differences."""

    version: Count
    object: Ref


class Order(Message, frozen=True):
    """A task for a client, and where to find what it needs."""

    run: str
    attempt: Count
    version: Count
    model: Ref
    """The broadcast of this version as a packed payload, complete and uncompressed; the ledger has its name."""
    share: float = 1.0
    work: float = 1.0
    clip: float | None = None
    encoded: Ref | None = None
    """The broadcast after the downlink's chain: a client that decodes it to `model` need not fetch that."""
    news: tuple[News, ...] = ()
    """Differences that lead to this version, oldest first, for clients that have the version before the first.

    A client whose result does not have the name of `model` fetches `model`."""
    counted: int | None = None
    """The newest attempt in which this client's update counted: its state after that attempt is valid."""
    seconds: float | None = None
    """Seconds until the deadline; none if unset."""
    secure: Ref | None = None
    """A message of secure aggregation to answer, in place of a task."""
    session: str | None = None
    """The session to hold now, such as of split learning; a client of such a run that gets none says that it is ready.

    Then `model` names what the server's first message carries, and is not fetched."""


class EvaluationOrder(Message, frozen=True):
    """A version that a client is to measure on its own samples; training does not wait for the answer."""

    run: str
    version: Count
    model: Ref
    """As that of an order to train on this version."""
    encoded: Ref | None = None
    news: tuple[News, ...] = ()
    counted: int | None = None
    secure: Ref | None = None
    """A message of secure aggregation to answer, by which what was measured is added, in place of an evaluation."""


class Orders(Message, frozen=True):
    """The answer to a poll. An idle client polls again after `retry` seconds, plus a random part of `spread`."""

    orders: tuple[Order, ...] = ()
    ended: tuple[str, ...] = ()
    """Runs that have ended."""
    open: int = 0
    """Number of runs that have not ended."""
    retry: float = 0.0
    spread: float = 1.0
    evaluations: tuple[EvaluationOrder, ...] = ()
    """Versions to measure, after the orders; only for clients that evaluate."""


class RunInfo(Message, frozen=True):
    """What a client needs to decide whether to take part in a run. The plan is data: names and numbers."""

    run: str
    plan: dict[str, Any]
    plan_hash: str
    num_clients: int
    """Number of clients of the run."""
    cohort: int
    """Minimum number of updates in a version."""
    num_bytes: Count
    """Bytes of the complete model."""
    max_samples: Count
    """Samples of the largest client, to which weights are relative under secure aggregation."""
    epsilon: float | None = None
    """Epsilon that the whole run may spend, if it is private."""
    peers: dict[str, Key] = {}
    """Public keys of all clients by number, under secure aggregation and where clients evaluate."""
    model: Ref | None = None
    """The final parameters, once the run has ended."""
    input_shape: tuple[int, ...] | None = None
    """The shape of one sample of the server's data."""
    num_outputs: int | None = None
    """The number of the model's outputs for the server's data, such as its classes."""
    problem: str = ""
    """The kind of problem that the server's data are for."""
    features: tuple[str, ...] = ()
    """Names of the columns of the server's data, where parties hold columns and these have names."""
    layers: Ref | None = None
    """Where parties hold columns, the names of the layers of each at the end."""


class OpenRuns(Message, frozen=True):
    """What the runs are that have not ended, for a preflight; one that has not begun may change with its clients."""

    runs: tuple[RunInfo, ...]


class Missing(Message, frozen=True):
    """Hashes of the chunks of an announced object that the server does not have."""

    chunks: tuple[str, ...]


class Delivery(Message, frozen=True):
    """Metadata of a delivered update, whose chunks are on the server; the signature covers `update_text`."""

    manifest: bytes
    num_samples: Annotated[int, Meta(ge=1, le=1 << 53)]
    loss: float | None
    """Mean training loss; None if the plan's client work has none."""
    weight: float
    signature: Signature
    broadcast: ObjectName | None = None
    """The name of the order's `model`, on which it was trained; older clients leave it out."""


class Answer(Message, frozen=True):
    """The manifest of an object: one that will be sent, or an answer in secure aggregation that was."""

    manifest: bytes


class Delivered(Message, frozen=True):
    """The update is stored by the server. Whether it counts is recorded in the ledger."""

    object: ObjectName


class Refusal(Message, frozen=True):
    """A client's refusal of a task; it is not asked for a while."""

    reason: Annotated[str, Meta(max_length=1000)]
    whole_run: bool = False
    """Whether the client leaves the whole run, such as where the plan is weaker than its floors."""


class SiteEvaluation(Message, frozen=True):
    """What a client measured of a version on its own samples, or why it tells nothing."""

    num_samples: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    sums: bytes = b""
    """A packed payload whose only side has the condensed sums of the plan's metrics, in float64."""
    epsilon: float | None = None
    """The epsilon of the noise in the counts; then there are no other sums, and they need not fit together."""
    reason: Annotated[str, Meta(max_length=1000)] = ""
    """Why there are no sums; "" if there are."""
    in_secret: bool = False
    """Whether the sums stay with the client, ready to be added in secret; then there are none here."""


class Readiness(Message, frozen=True):
    """The result of a client's preflight for a run, which trains for nobody."""

    ready: bool
    reason: Annotated[str, Meta(max_length=1000)] = ""
    """What stands in the way; "" if it is ready."""
    seconds: Annotated[float, Meta(ge=0)] | None = None
    """Estimated seconds that a task takes."""


class Lines(Message, frozen=True):
    """Lines of a run's ledger from the requested one on, at most 200."""

    lines: tuple[str, ...]


class Done(Message, frozen=True):
    """An answer without content."""


def update_text(run: str, attempt: int, version: int, name: str, delivery: Delivery) -> bytes:
    """Return what a client signs to deliver an update; the ledger keeps the signature."""
    return signing.update_text(
        run, attempt, version, name, delivery.num_samples, delivery.loss, delivery.weight, delivery.broadcast
    )


def read_message(data: bytes, kind: type[A]) -> A:
    """Read a message, and refuse base64 whose last bits decoders ignore: each value has one spelling.

    >>> read_message(b'{"manifest": "AA=="}', Answer)
    Answer(manifest=b'\\x00')
    >>> read_message(b'{"manifest": "AB=="}', Answer)
    Traceback (most recent call last):
    msgspec.ValidationError: manifest is not spelt as base64 spells it
    """
    message = msgspec.json.decode(data, type=kind)
    for name in message.__struct_fields__:
        value = getattr(message, name)
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, bytes) and base64.b64encode(each) not in data:
                raise msgspec.ValidationError(f"{name} is not spelt as base64 spells it")
    return message


def is_run_name(text: str) -> bool:
    """Return whether a text can be the name of a run.

    >>> is_run_name("mnist-2"), is_run_name("../x")
    (True, False)
    """
    return RUN_NAME.fullmatch(text) is not None
