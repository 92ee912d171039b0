"""Messages between client and server: strict structs, each in a signed envelope, with every length bounded.

Structs hold numbers and bytes only. A list, such as the shares for all neighbours, is one byte string of records of
equal length, so that no memory is allocated for what a header merely claims.
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
"""Sender number of the server; clients are numbered from 0."""
MAX_CLIENTS = 1 << 20
MAX_LENGTH = 1 << 32
SEALED = 2 * SHARE + 16
"""Number of bytes of an encrypted pair of shares, with its authentication tag."""
HASH = 32
NAME_LENGTH = 64
"""Maximum length of a run's name over a network, and the length of a plan's identity."""
SIGNATURE = 64
RECORD = struct.Struct("<Q32s32s32s64s")
"""Layout of an advert for other clients: client, mask key, channel key, commitment, signature."""
ENVELOPE_BYTES = 256
"""Upper bound on the bytes of an envelope and the small fields of any message."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CLIENTS)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Mode = Literal["curious", "active"]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, without unknown fields, and encoded as an array that starts with its tag."""


class Config(Message, frozen=True):
    """Configuration of a session, common to all participants."""

    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
    """Number of values in a vector, including the weight."""
    encoding: Encoding
    mode: Mode = "active"
    """Server behaviour that is withstood: `curious` reads everything it receives, `active` also lies."""
    dropouts: Rate = 0.1
    """Share of the clients that may be lost after sending their keys, in [0, 1)."""
    colluding: Rate = 0.1
    """Share of the clients that may collude with the server, in [0, 1)."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a vector."""
        return self.length * self.encoding.modulus_bits // 8

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """NumPy type of a vector's values."""
        return self.encoding.dtype


class Invite(Message, frozen=True, tag="invite"):
    """The server's invitation to a cohort; the hash of this message identifies the session."""

    run: Annotated[str, msgspec.Meta(max_length=256)]
    round: Natural
    attempt: Natural
    config: Config
    model: Hash
    """Hash of the model that the clients start from."""
    cohort: Annotated[bytes, msgspec.Meta(min_length=16, max_length=8 * MAX_CLIENTS)]
    """Client numbers of 8 bytes, ascending."""


class Advert(Message, frozen=True, tag="advert"):
    """A client's public keys for this session, and the commitment to its own mask."""

    mask_key: Hash
    channel_key: Hash
    commitment: Hash
    """Hash of the secret of its own mask."""


class Roster(Message, frozen=True, tag="roster"):
    """The clients that advertised: a Merkle root of all adverts, and the records of one client's neighbours."""

    num_clients: Count
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CLIENTS)]
    """Place of the receiver in the roster."""
    root: Hash
    records: bytes
    """Adverts of the receiver's neighbours, in ascending order."""
    proofs: bytes
    """Merkle proofs of the receiver's record, then of its neighbours' records."""


class Shares(Message, frozen=True, tag="shares"):
    """A client's shares of its two secrets, encrypted for each neighbour in ascending order."""

    sealed: bytes


class Mailbox(Message, frozen=True, tag="mailbox"):
    """The encrypted shares that neighbours sent to one client."""

    senders: bytes
    """One bit for each neighbour: whether it sent shares."""
    sealed: bytes


class Masked(Message, frozen=True, tag="masked"):
    """A client's masked vector; a memory view, because a vector is large and read once."""

    vector: memoryview


class Survivors(Message, frozen=True, tag="survivors"):
    """The clients whose vectors are in the sum: one bit for each client of the roster."""

    bits: bytes


class Consent(Message, frozen=True, tag="consent"):
    """A client's consent to one survivor set, and to no other in this session."""

    digest: Hash


class Consents(Message, frozen=True, tag="consents"):
    """The neighbours that consented to the same survivor set, with their signatures."""

    senders: bytes
    signatures: bytes


class Reveal(Message, frozen=True, tag="reveal"):
    """One share of each neighbour that sent shares: of its own mask if it survived, else of its mask key."""

    shares: bytes


class Envelope(Message, frozen=True):
    """A message with its sender, its session, and a signature on all of them."""

    sender: Annotated[int, msgspec.Meta(ge=SERVER, le=(1 << 63) - 1)]
    session: Hash
    body: memoryview
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE, max_length=SIGNATURE)]


AnyMessage = Invite | Advert | Roster | Shares | Mailbox | Masked | Survivors | Consent | Consents | Reveal
M = TypeVar("M", bound=AnyMessage)

_envelopes = msgspec.msgpack.Decoder(Envelope)
_bodies = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage | Envelope) -> bytes:
    """Encode a message; equal messages give equal bytes."""
    return msgspec.msgpack.encode(message)


def session_id(invite: Invite) -> bytes:
    """Return the hash of run, round, attempt, configuration, model and cohort, which identifies a session."""
    return hashlib.sha256(b"atoll secagg 1 session" + encode(invite)).digest()


def name_padding(invite: Invite) -> int:
    """Return the bytes that are added to an invitation's, so that they do not depend on what a run is called.

    They are counted as if the run's name had NAME_LENGTH characters, as the one of a simulated run has.
    """
    padded = msgspec.structs.replace(invite, run=invite.run.ljust(NAME_LENGTH))
    long, short = (len(msgspec.msgpack.encode(encode(each))) for each in (padded, invite))
    return long - short


def cohort(clients: list[int] | tuple[int, ...]) -> bytes:
    """Encode a cohort for an invitation."""
    return np.array(sorted(clients), "<u8").tobytes()


def read_cohort(invite: Invite) -> tuple[int, ...]:
    """Return the clients of an invitation, each once and in ascending order."""
    if len(invite.cohort) % 8:
        raise Abort(Reason.MALFORMED, "the cohort is cut off; exclude its sender")
    clients = np.frombuffer(invite.cohort, "<u8")
    if (clients[1:] <= clients[:-1]).any() or clients[-1] >= 1 << 63:
        raise Abort(Reason.MALFORMED, "the cohort is not in ascending order; exclude its sender")
    return tuple(clients.tolist())


def sign(key: Ed25519PrivateKey, sender: int, session: bytes, message: AnyMessage) -> Envelope:
    """Put a message into a signed envelope."""
    body = encode(message)
    return Envelope(sender, session, memoryview(body), key.sign(_signed_text(sender, session, body)))


def holds(key: bytes, sender: int, session: bytes, body: bytes | memoryview, signature: bytes) -> bool:
    """Return whether a signature is the sender's, on this body in this session."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_text(sender, session, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def signed_by(key: bytes, envelope: Envelope) -> bool:
    """Return whether an envelope was signed with the private half of this key."""
    return holds(key, envelope.sender, envelope.session, envelope.body, envelope.signature)


def read_envelope(data: bytes, max_bytes: int) -> Envelope:
    """Decode an envelope of at most `max_bytes` bytes; the signature is not verified here."""
    if len(data) > max_bytes:
        raise Abort(
            Reason.MALFORMED, f"the message has {len(data)} bytes, at most {max_bytes} are allowed; exclude its sender"
        )
    try:
        envelope = _envelopes.decode(data)
    except msgspec.MsgspecError as error:
        raise Abort(Reason.MALFORMED, f"the bytes are not an envelope ({error}); exclude their sender") from error
    if encode(envelope) != data:
        raise Abort(Reason.MALFORMED, "the envelope is not encoded in its shortest form; exclude its sender")
    return envelope


def read_body(envelope: Envelope, expected: type[M]) -> M:
    """Decode the message in an envelope, if it is of the expected type."""
    try:
        message = _bodies.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise Abort(Reason.MALFORMED, f"the envelope holds no message ({error}); exclude its sender") from error
    if encode(message) != envelope.body:
        raise Abort(Reason.MALFORMED, "the message is not encoded in its shortest form; exclude its sender")
    if not isinstance(message, expected):
        raise Abort(
            Reason.UNEXPECTED,
            f"got {type(message).__name__} where {expected.__name__} is expected; start a new attempt on both sides",
        )
    return message


def record(sender: int, advert: Advert, signature: bytes) -> bytes:
    """Encode an advert for other clients."""
    return RECORD.pack(sender, advert.mask_key, advert.channel_key, advert.commitment, signature)


def read_record(data: bytes) -> tuple[int, Advert, bytes]:
    """Decode the result of `record` into client, advert and signature."""
    sender, mask_key, channel_key, commitment, signature = RECORD.unpack(data)
    return sender, Advert(mask_key, channel_key, commitment), signature


def survivor_digest(session: bytes, root: bytes, survivors: bytes) -> bytes:
    """Return the hash of a survivor set that clients sign."""
    return hashlib.sha256(b"atoll secagg 1 survivors" + session + root + survivors).digest()


def pack_bits(bits: np.ndarray) -> bytes:
    """Encode booleans, eight to a byte."""
    return np.packbits(bits, bitorder="little").tobytes()


def read_bits(data: bytes, num: int) -> np.ndarray:
    """Decode `num` booleans from their only valid encoding."""
    if len(data) != -(-num // 8):
        raise Abort(Reason.MALFORMED, f"{len(data)} bytes do not hold {num} bits; exclude their sender")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(bool)
    if bits[num:].any():
        raise Abort(Reason.MALFORMED, f"bits are set beyond the expected {num}; exclude their sender")
    return bits[:num]


def _signed_text(sender: int, session: bytes, body: bytes | memoryview) -> bytes:
    return b"atoll secagg 1 message" + struct.pack("<q", sender) + session + hashlib.sha256(body).digest()
