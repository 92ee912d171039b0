"""Whatever is signed or named by a hash has one spelling: no other passes as the same."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ledger.honest_ledger import SERVER, honest_records, public, signed_lines

from atoll.ledger import chain
from atoll.ledger.audit import Fault, audit
from atoll.network.protocol.identity import HEADERS, Stamp, read_stamp, sign
from atoll.network.protocol.messages import Hello, read_message
from atoll.network.protocol.objects import ObjectError, manifest_of, read_manifest
from atoll.secagg import wire
from atoll.secagg.aborts import Abort

LINES, _ = signed_lines(honest_records())
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@pytest.mark.parametrize("other", [str.upper, lambda text: f"{text[:64]} {text[64:]}", lambda text: f"{text}\n"])
def test_a_ledgers_signature_has_one_spelling(other: object) -> None:
    record, signature = chain.read(LINES[1])
    line = LINES[1].replace(signature, other(signature).replace("\n", "\\n"))  # type: ignore[operator]
    assert line != LINES[1]
    fault = audit([LINES[0], line, *LINES[2:]], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 1 and "signature is invalid" in fault.what
    records = honest_records()
    records[1][1]["cohort"][0]["signature"] += "\n"
    fault = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 1 and record.kind == "commit"


def test_a_requests_stamp_has_one_spelling() -> None:
    key = Ed25519PrivateKey.generate()
    stamp = sign(key, Stamp("ab" * 16, 3, 1, 1_700_000_000), "POST", "/v1/poll", b"")
    headers = stamp.headers()
    assert read_stamp(headers) == stamp
    signature = headers[HEADERS[-1]]
    for name, other in [(HEADERS[-1], signature.upper()), (HEADERS[-1], f"{signature} "), (HEADERS[1], "03")]:
        assert read_stamp({**headers, name: other}) is None


def test_bytes_in_a_message_have_one_spelling() -> None:
    hello = Hello("ab" * 16, "nonce", bytes(64))
    data = msgspec.json.encode(hello)
    assert read_message(data, Hello) == hello
    last = base64.b64encode(bytes(64)).decode()[:-2]
    for letter in ALPHABET[1:16]:  # four bits that decoders ignore
        other = data.replace(last.encode(), f"{last[:-1]}{letter}".encode())
        assert other != data and msgspec.json.decode(other, type=Hello) == hello
        with pytest.raises(msgspec.ValidationError, match="signature is not spelt"):
            read_message(other, Hello)
    with pytest.raises(msgspec.ValidationError):
        read_message(data.replace(b'abab",', b'abab\\n",'), Hello)


def test_a_manifest_has_one_spelling(tmp_path: Path) -> None:
    manifest = manifest_of(bytes(300))
    data = msgspec.msgpack.encode(manifest)
    assert read_manifest(data, 1000) == manifest
    longer = data.replace(b"\xcd\x01\x2c", b"\xd1\x01\x2c")  # 300 as a signed number, of the same length
    assert len(longer) == len(data) and longer != data
    with pytest.raises(ObjectError, match="shortest form"):
        read_manifest(longer, 1000)


def test_messages_of_secure_aggregation_have_one_spelling() -> None:
    key = Ed25519PrivateKey.generate()
    envelope = wire.sign(key, 300, bytes(32), wire.Consent(bytes(32)))
    data = wire.encode(envelope)
    assert wire.read_body(wire.read_envelope(data, 1000), wire.Consent) == wire.Consent(bytes(32))
    with pytest.raises(Abort, match="not encoded in its shortest form"):
        wire.read_envelope(data.replace(b"\xcd\x01\x2c", b"\xd1\x01\x2c"), 1000)
    body = bytes(envelope.body).replace(b"\xc4\x20", b"\xc5\x00\x20")  # a longer length of the same bytes
    with pytest.raises(Abort, match="not encoded in its shortest form"):
        wire.read_body(msgspec.structs.replace(envelope, body=memoryview(body)), wire.Consent)
