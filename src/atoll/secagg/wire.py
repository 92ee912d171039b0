"""What client and server say to each other: strict structs, each in a signed envelope, with every length bounded.

Structs hold numbers and bytes only. A list, such as the shares for all neighbours, is one run of bytes with records of
one length, so that nothing is set aside for what a header merely claims.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.encoding import Encoding
from atoll.secagg.shamir import SHARE

SERVER = -1
"""The sender of what the server says; clients are numbered from 0."""
MAX_CLIENTS = 1 << 20
MAX_LENGTH = 1 << 32
SEALED = 2 * SHARE + 16
"""Bytes of a sealed pair of shares, with its tag."""
HASH = 32
SIGNATURE = 64
RECORD = struct.Struct("<Q32s32s32s64s")
"""An advert as others see it: client, mask key, channel key, commitment, signature."""
ENVELOPE_BYTES = 256
"""More than an envelope and the small fields of any message need."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CLIENTS)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Mode = Literal["curious", "active"]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all messages have in common: frozen, exact, and written as an array that starts with its name."""


class Config(Message, frozen=True):
    """What all who take part agree on."""

    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
    """Values in a vector, the weight included."""
    encoding: Encoding
    mode: Mode = "active"
    """What the server may do: look at everything it is sent, or also lie."""
    dropouts: Rate = 0.1
    """Share of the clients that may be lost between their keys and the end."""
    colluding: Rate = 0.1
    """Share of the clients that may work with the server."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a vector."""
        return self.length * self.encoding.modulus_bits // 8

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """How a vector's values lie in memory."""
        return np.dtype(f"<u{self.encoding.modulus_bits // 8}")


class Invite(Message, frozen=True, tag="invite"):
    """The server asks a cohort; the hash of this message is the session."""

    run: Annotated[str, msgspec.Meta(max_length=256)]
    round: Natural
    attempt: Natural
    config: Config
    model: Hash
    """Hash of the model that the clients start from."""
    cohort: Annotated[bytes, msgspec.Meta(min_length=16, max_length=8 * MAX_CLIENTS)]
    """Who is asked: client numbers of 8 bytes, ascending."""


class Advert(Message, frozen=True, tag="advert"):
    """A client's keys for this session, and the promise of its own mask."""

    mask_key: Hash
    channel_key: Hash
    commitment: Hash
    """Hash of the seed of its own mask."""


class Roster(Message, frozen=True, tag="roster"):
    """Who advertised: a Merkle root over all, and the records of one client's neighbours with their proofs."""

    num_clients: Count
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CLIENTS)]
    """The place of the receiver among them."""
    root: Hash
    records: bytes
    proofs: bytes
    """The receiver's proof, then those of its neighbours."""


class Shares(Message, frozen=True, tag="shares"):
    """A client's shares of its two secrets, sealed for each neighbour in ascending order."""

    sealed: bytes


class Mailbox(Message, frozen=True, tag="mailbox"):
    """The shares that neighbours sent to one client."""

    senders: bytes
    """A bit for each neighbour: whether it sent shares."""
    sealed: bytes


class Masked(Message, frozen=True, tag="masked"):
    """A client's vector under its masks; a view, since a vector is large and read once."""

    vector: memoryview


class Survivors(Message, frozen=True, tag="survivors"):
    """Whose vectors are in the sum: a bit for each client of the roster."""

    bits: bytes


class Consent(Message, frozen=True, tag="consent"):
    """A client saw this survivor set, and will go by no other."""

    digest: Hash


class Consents(Message, frozen=True, tag="consents"):
    """Which neighbours saw the same survivor set, with their signatures."""

    senders: bytes
    signatures: bytes


class Reveal(Message, frozen=True, tag="reveal"):
    """For each neighbour that shared: the share of its own mask if it survived, else of its key."""

    shares: bytes


class Envelope(Message, frozen=True):
    """A message with who says it, in which session, and the signature on all of that."""

    sender: Annotated[int, msgspec.Meta(ge=SERVER, le=(1 << 63) - 1)]
    session: Hash
    body: memoryview
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE, max_length=SIGNATURE)]


AnyMessage = Invite | Advert | Roster | Shares | Mailbox | Masked | Survivors | Consent | Consents | Reveal
M = TypeVar("M", bound=AnyMessage)

_envelopes = msgspec.msgpack.Decoder(Envelope)
_bodies = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage | Envelope) -> bytes:
    """Write a message; one message always gives the same bytes."""
    return msgspec.msgpack.encode(message)


def session_id(invite: Invite) -> bytes:
    """Name a session by run, round, attempt, configuration, model and cohort."""
    return hashlib.sha256(b"atoll secagg 1 session" + encode(invite)).digest()


def cohort(clients: list[int] | tuple[int, ...]) -> bytes:
    """Write a cohort for an invitation."""
    return np.array(sorted(clients), "<u8").tobytes()


def read_cohort(invite: Invite) -> tuple[int, ...]:
    """Who is asked, each once and in ascending order."""
    if len(invite.cohort) % 8:
        raise Abort(Reason.MALFORMED, "a cohort that is cut off; drop its sender")
    clients = np.frombuffer(invite.cohort, "<u8")
    if (clients[1:] <= clients[:-1]).any() or clients[-1] >= 1 << 63:
        raise Abort(Reason.MALFORMED, "a cohort that does not ascend; drop its sender")
    return tuple(clients.tolist())


def sign(key: Ed25519PrivateKey, sender: int, session: bytes, message: AnyMessage) -> Envelope:
    """Put a message into an envelope."""
    body = encode(message)
    return Envelope(sender, session, memoryview(body), key.sign(_signed(sender, session, body)))


def holds(key: bytes, sender: int, session: bytes, body: bytes | memoryview, signature: bytes) -> bool:
    """Whether a signature is that of the sender on this body in this session."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(sender, session, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def signed_by(key: bytes, envelope: Envelope) -> bool:
    """Whether an envelope was signed with the private half of this key."""
    return holds(key, envelope.sender, envelope.session, envelope.body, envelope.signature)


def read_envelope(data: bytes, max_bytes: int) -> Envelope:
    """Read an envelope of at most so many bytes; who signed it is not looked at here."""
    if len(data) > max_bytes:
        raise Abort(
            Reason.MALFORMED, f"a message of {len(data)} bytes, at most {max_bytes} are due now; drop its sender"
        )
    try:
        found = _envelopes.decode(data)
    except msgspec.MsgspecError as error:
        raise Abort(Reason.MALFORMED, f"bytes that are no envelope ({error}); drop its sender") from error
    if encode(found) != data:
        raise Abort(Reason.MALFORMED, "an envelope in another spelling than the shortest; drop its sender")
    return found


def read_body(envelope: Envelope, expected: type[M]) -> M:
    """Read the message in an envelope, if it is of the expected kind."""
    try:
        message = _bodies.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise Abort(Reason.MALFORMED, f"an envelope without a message ({error}); drop its sender") from error
    if encode(message) != envelope.body:
        raise Abort(Reason.MALFORMED, "a message in another spelling than the shortest; drop its sender")
    if not isinstance(message, expected):
        raise Abort(
            Reason.UNEXPECTED,
            f"{type(message).__name__} where {expected.__name__} is due; let both sides start a new attempt",
        )
    return message


def record(sender: int, advert: Advert, signature: bytes) -> bytes:
    """Write an advert as others see it."""
    return RECORD.pack(sender, advert.mask_key, advert.channel_key, advert.commitment, signature)


def read_record(data: bytes) -> tuple[int, Advert, bytes]:
    """Read what `record` wrote: client, advert, signature."""
    sender, mask_key, channel_key, commitment, signature = RECORD.unpack(data)
    return sender, Advert(mask_key, channel_key, commitment), signature


def survivor_digest(session: bytes, root: bytes, survivors: bytes) -> bytes:
    """What clients sign of a survivor set."""
    return hashlib.sha256(b"atoll secagg 1 survivors" + session + root + survivors).digest()


def pack_bits(bits: np.ndarray) -> bytes:
    """Write booleans, eight to a byte."""
    return np.packbits(bits, bitorder="little").tobytes()


def read_bits(data: bytes, num: int) -> np.ndarray:
    """Read so many booleans; there is one way only to write them."""
    if len(data) != -(-num // 8):
        raise Abort(Reason.MALFORMED, f"{len(data)} bytes for {num} bits; drop its sender")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(bool)
    if bits[num:].any():
        raise Abort(Reason.MALFORMED, f"bits beyond the {num} that are due; drop its sender")
    return bits[:num]


def _signed(sender: int, session: bytes, body: bytes | memoryview) -> bytes:
    return b"atoll secagg 1 message" + struct.pack("<q", sender) + session + hashlib.sha256(body).digest()
