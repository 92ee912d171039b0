"""Requests are their client's, fresh, and taken once."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import RunError
from atoll.network.protocol.identity import (
    HEADERS,
    WINDOW,
    CounterWindow,
    Stamp,
    client_id,
    load_key,
    make_key,
    public_bytes,
    read_stamp,
    sign,
    signed_by,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = public_bytes(KEY)
STAMP = Stamp(client_id(PUBLIC), 3, 17, 1_700_000_000)
BODY = b"some bytes"
SIGNED = sign(KEY, STAMP, "POST", "/v1/poll", BODY)


def test_a_request_is_bound_to_everything_about_it() -> None:
    stamp = sign(KEY, STAMP, "POST", "/v1/poll?x=1", BODY)
    assert signed_by(PUBLIC, stamp, "POST", "/v1/poll?x=1")
    changed = [
        (stamp, "PUT", "/v1/poll?x=1"),
        (stamp, "POST", "/v1/poll?x=2"),
        (stamp._replace(body=hashlib.sha256(b"others").hexdigest()), "POST", "/v1/poll?x=1"),
        (stamp._replace(client="0" * 32), "POST", "/v1/poll?x=1"),
        (stamp._replace(epoch=4), "POST", "/v1/poll?x=1"),
        (stamp._replace(counter=18), "POST", "/v1/poll?x=1"),
        (stamp._replace(time=stamp.time + 1), "POST", "/v1/poll?x=1"),
        (stamp._replace(signature=bytes(64)), "POST", "/v1/poll?x=1"),
        (stamp._replace(signature=b""), "POST", "/v1/poll?x=1"),
    ]
    assert not any(signed_by(PUBLIC, *each) for each in changed)
    assert not signed_by(bytes(32), stamp, "POST", "/v1/poll?x=1")


@given(st.integers(0, 10**14), st.integers(0, 10**14), st.integers(0, 10**10), st.binary(min_size=64, max_size=64))
def test_stamps_travel_in_headers(epoch: int, counter: int, time: int, signature: bytes) -> None:
    stamp = Stamp("ab" * 16, epoch, counter, time, signature)
    assert read_stamp(stamp.headers()) == stamp


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (HEADERS[1], "-1"),
        (HEADERS[2], "1e3"),
        (HEADERS[2], "9" * 400),
        (HEADERS[3], "٣"),
        (HEADERS[4], "zz"),
        (HEADERS[4], "AB" * 64),
        (HEADERS[0], "é" * 32),
        (HEADERS[5], "0" * 63),
    ],
)
def test_rubbish_in_headers_is_no_stamp(name: str, value: str) -> None:
    assert read_stamp(SIGNED.headers()) == SIGNED
    assert read_stamp({**SIGNED.headers(), name: value}) is None
    assert read_stamp({k: v for k, v in SIGNED.headers().items() if k != name}) is None


@given(st.lists(st.integers(-2, 3 * WINDOW), max_size=200))
def test_no_counter_is_taken_twice_and_fresh_ones_are_taken(counters: list[int]) -> None:
    seen, taken = CounterWindow(), set()
    for counter in counters:
        after = seen.with_counter(counter)
        fresh = counter >= 1 and counter not in taken and counter > max(taken, default=0) - WINDOW
        assert (after is not None) == fresh
        if after is not None:
            taken.add(counter)
            seen = after


def test_keys_are_kept_from_others(tmp_path: Path) -> None:
    path = tmp_path / "home" / "key"
    key = make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_bytes(load_key(path)) == public_bytes(key)
    with pytest.raises(RunError, match="already"):
        make_key(path)
    path.chmod(0o644)
    with pytest.raises(RunError, match="chmod 600"):
        load_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="5 bytes"):
        load_key(path)
    with pytest.raises(RunError, match="atoll enrol"):
        load_key(tmp_path / "nowhere")
