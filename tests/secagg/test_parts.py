"""Tests of Shamir shares, masks, encoding, graph, tree and wire."""

from __future__ import annotations

import itertools
import os
import tracemalloc

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secagg.harness import federation, identity, public

from atoll.core.errors import PlanError
from atoll.secagg import graph, keys, masks, shamir, tree, wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.encoding import Encoding, check_sum, decode, encode, finest
from atoll.secagg.graph import parameters

# Shamir


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_of_shares_give_the_secret(secret: bytes, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 20))
    threshold = data.draw(st.integers(1, num))
    shares = shamir.split(secret, threshold, num, os.urandom)
    holders = sorted(data.draw(st.permutations(range(num)))[:threshold])
    coefficients = shamir.coefficients([h + 1 for h in holders])
    assert shamir.combine([shares[h] for h in holders], coefficients) == secret


def test_extreme_secrets_survive() -> None:
    for secret in (bytes(32), b"\xff" * 32):
        shares = shamir.split(secret, 3, 5, os.urandom)
        for some in itertools.combinations(range(5), 3):
            assert shamir.combine([shares[i] for i in some], shamir.coefficients([i + 1 for i in some])) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """With one share missing, each secret is explained by exactly one value of it: the others say nothing."""
    shares = shamir.split(b"\7" * 32, 3, 3, os.urandom)
    c = shamir.coefficients([1, 2, 3])
    for other in (0, 1, 2**255):
        known = sum(int.from_bytes(s, "big") * k for s, k in zip(shares[:2], c[:2], strict=True))
        missing = (other - known) * pow(c[2], -1, shamir.P) % shamir.P
        assert shamir.combine([*shares[:2], missing.to_bytes(33, "big")], c) == other.to_bytes(32, "big")


def test_shares_of_longer_secrets_are_detected() -> None:
    assert shamir.combine([(1 << 256).to_bytes(33, "big")], [1]) is None


def test_field_is_a_prime_above_all_secrets() -> None:
    import sympy

    assert sympy.nextprime(2**256) == shamir.P


# Masks


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("length", [1, 3, masks.BLOCK // 8, masks.BLOCK // 4 + 1, 200_003])
def test_masks_cancel_and_do_not_depend_on_blocks(dtype: str, length: int) -> None:
    before = np.frombuffer(os.urandom(length * int(dtype[2])), dtype)
    vector, seed, mask = before.copy(), os.urandom(32), np.empty(length, dtype)
    masks.apply(vector, [masks.Mask(seed, True)])
    masks.expand(seed, mask)
    assert (vector == before + mask).all()
    masks.apply(vector, [masks.Mask(seed, False)])
    assert (vector == before).all()


def test_mask_is_aes_256_in_counter_mode() -> None:
    """NIST SP 800-38A has no vector with a counter from 0; this is AES-256 of block 0 under FIPS 197's key."""
    out = np.empty(4, "<u4")
    masks.expand(bytes(range(32)), out)
    assert out.tobytes().hex() == "f29000b62a499fd0a9f39a6add2e7780"


def test_mask_bytes_look_uniform() -> None:
    mask = np.empty(1 << 20, "<u4")
    masks.expand(os.urandom(32), mask)
    counts = np.bincount(mask.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-9


# Keys


def test_both_ends_agree_and_purposes_differ() -> None:
    a, b = os.urandom(32), os.urandom(32)
    A, B = keys.public_key(a), keys.public_key(b)
    key = X25519PrivateKey.from_private_bytes
    mask = keys.agree(key(a), A, B, b"s", b"mask")
    assert mask == keys.agree(key(b), B, A, b"s", b"mask")
    assert len({mask, keys.agree(key(a), A, B, b"s", b"channel"), keys.agree(key(a), A, B, b"t", b"mask")}) == 3


def test_low_order_keys_are_refused() -> None:
    private = os.urandom(32)
    with pytest.raises(Abort) as abort:
        keys.agree(
            X25519PrivateKey.from_private_bytes(private), keys.public_key(private), bytes(32), bytes(32), b"mask"
        )
    assert abort.value.reason is Reason.BAD_KEY


@pytest.mark.parametrize("change", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_sealed_shares_open_for_their_route_only(change: tuple[int, int, int]) -> None:
    channel, session = os.urandom(32), os.urandom(32)
    sealed = keys.seal(channel, session, 5, 9, b"shares")
    assert keys.unseal(channel, session, 5, 9, sealed) == b"shares"
    other = bytes([session[0] ^ change[0]]) + session[1:]
    with pytest.raises(Abort) as abort:
        keys.unseal(channel, other, 5 + change[1], 9 + change[2], sealed)
    assert abort.value.reason is Reason.BAD_SHARE


# Encoding


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20),
    st.floats(0, 1),
    st.integers(2, 24),
    st.sampled_from([32, 64]),
)
def test_values_come_back_within_a_level(values: list[float], weight: float, bits: int, modulus: int) -> None:
    encoding = Encoding(2.0, bits, modulus)
    encoded = encode(np.array(values, np.float32), weight, encoding, masks.Stream())
    signed = encoded.view(f"<i{modulus // 8}").astype(float)
    assert np.abs(signed).max() <= encoding.levels
    exact = np.append(np.clip(values, -2, 2) / 2 * weight, weight) * encoding.levels
    assert np.abs(signed - exact).max() < 1 + 1e-6


@pytest.mark.parametrize("modulus", [32, 64])
def test_weighted_mean_of_a_sum_that_wraps(modulus: int) -> None:
    rng = np.random.default_rng(1)
    encoding = finest(1.0, 10, modulus)
    values, weights = rng.uniform(-1.2, 1.2, (10, 50)), rng.uniform(0, 1, 10)
    total = sum(encode(v, w, encoding, masks.Stream()) for v, w in zip(values, weights, strict=True))
    mean, weight = decode(total, encoding)
    wanted = (np.clip(values, -1, 1) * weights[:, None]).sum(0) / weights.sum()
    assert np.abs(mean - wanted).max() < 20 / encoding.levels
    assert weight == pytest.approx(weights.sum(), abs=20 / encoding.levels)


def test_rounding_is_unbiased() -> None:
    encoding = Encoding(1.0, 4)
    encoded = encode(np.full(200_000, 0.3), 1.0, encoding, masks.Stream()).view("<i4")[:-1]
    assert set(np.unique(encoded)) == {2, 3}
    assert encoded.mean() == pytest.approx(2.1, abs=0.006)  # six deviations


def test_extremes_never_leave_their_range() -> None:
    encoding = finest(0.1, 500)
    encoded = encode(np.array([0.1, -0.1, np.inf, -np.inf] * 1000), 1.0, encoding, masks.Stream()).view("<i4")
    assert encoded.max() == encoding.levels
    assert encoded.min() == -encoding.levels
    assert 500 * encoding.levels < 2**31


def test_encodings_that_could_overflow_are_refused() -> None:
    check_sum(Encoding(1.0, 23), 500)
    with pytest.raises(PlanError, match="modulus_bits = 64"):
        check_sum(Encoding(1.0, 24), 500)
    for num in (2, 3, 4, 5, 500, 512, 513, 10_000, 10**6):
        check_sum(finest(1.0, num), num)
        wider = Encoding(1.0, finest(1.0, num).value_bits + 1)
        if wider.levels * num < 2**31:
            assert num & (num - 1) == 0  # a power of two could have one bit more, less one level
    with pytest.raises(PlanError, match="smaller cohort"):
        finest(1.0, 1 << 31)


def test_bad_values_are_refused() -> None:
    with pytest.raises(PlanError, match="finite"):
        encode(np.array([np.nan]), 1.0, Encoding(1.0, 8), masks.Stream())
    with pytest.raises(PlanError, match="largest"):
        encode(np.array([1.0]), 1.5, Encoding(1.0, 8), masks.Stream())


def test_a_sum_without_weight_decodes_to_zeros() -> None:
    encoding = Encoding(1.0, 8)
    mean, weight = decode(encode(np.ones(3), 0.0, encoding, masks.Stream()), encoding)
    assert (mean == 0).all()
    assert weight == 0


def test_a_stream_continues_and_repeats_by_key() -> None:
    stream = masks.Stream(b"k" * 32)
    both = np.concatenate([stream.uniform(4), stream.uniform(4)])
    assert (both == masks.Stream(b"k" * 32).uniform(8)).all()
    assert len(set(both)) == 8
    assert (masks.Stream().uniform(8) != masks.Stream().uniform(8)).any()


# Graph


@pytest.mark.parametrize(
    ("num", "colluding", "dropouts", "mode", "degree", "threshold"),
    [
        (1000, 0.1, 0.1, "curious", 48, 27),
        (1000, 0.1, 0.1, "active", 96, 67),
        # as Google's federated-compute finds them (fcp/secagg/server/graph_parameter_finder_test.cc)
        (100, 0.33, 0.33, "curious", 68, 34),
        (1000, 0.33, 0.33, "curious", 286, 150),
        (10_000, 0.33, 0.33, "curious", 422, 221),
        (1000, 0.05, 0.33, "curious", 72, 24),
        (100, 0.3, 0.3, "active", 92, 62),
        (1000, 0.3, 0.3, "active", 872, 584),
        (1000, 0.05, 0.33, "active", 398, 223),
        (100_000, 0.33, 0.05, "active", 196, 160),
    ],
)
def test_known_degrees_and_thresholds(
    num: int, colluding: float, dropouts: float, mode: wire.Mode, degree: int, threshold: int
) -> None:
    assert parameters(num, dropouts, colluding, mode)[1:3] == (degree, threshold)


@pytest.mark.parametrize("mode", ["curious", "active"])
@pytest.mark.parametrize("num", [65, 200, 1000, 5000])
def test_parameters_meet_their_bounds_by_scipy(num: int, mode: wire.Mode) -> None:
    params = parameters(num, 0.1, 0.1, mode)
    assert not params.complete
    colluding = stats.hypergeom(num, num // 10, params.degree)
    safe = params.threshold if mode == "curious" else 2 * params.threshold - params.degree
    assert colluding.sf(safe - 1) * num <= 2**-41
    left = stats.hypergeom(num, num - num // 10, params.degree)
    assert left.cdf(params.threshold - 1) * num <= 2**-20


def test_small_cohorts_are_complete_and_impossible_ones_refused() -> None:
    assert parameters(64, 0.1, 0.1, "active").complete
    assert parameters(3, 0.3, 0.0, "curious")[1:] == (2, 2, 2)
    assert parameters(65, 0.3, 0.4, "active").complete  # no sparse graph will do
    for mode, dropouts, colluding in [("active", 0.5, 0.2), ("curious", 0.5, 0.6), ("active", 0.9, 0.0)]:
        with pytest.raises(PlanError, match="ask more clients"):
            parameters(20, dropouts, colluding, mode)
    with pytest.raises(PlanError):
        parameters(1, 0.0, 0.0, "curious")


@given(st.integers(2, 200), st.floats(0, 0.5), st.floats(0, 0.5), st.sampled_from(["curious", "active"]))
@settings(max_examples=60, deadline=None)
def test_every_threshold_is_safe(num: int, dropouts: float, colluding: float, mode: wire.Mode) -> None:
    try:
        params = parameters(num, dropouts, colluding, mode)
    except PlanError:
        return
    holders = params.num_clients if params.complete else params.degree
    assert 2 <= params.threshold <= holders
    assert params.threshold <= params.min_survivors
    if params.complete:
        bad = int(num * colluding)
        assert params.threshold > bad
        assert mode == "curious" or 2 * params.threshold > num + bad


@pytest.mark.parametrize("num", [5, 100, 301])
def test_neighbours_are_mutual_and_unpredictable(num: int) -> None:
    params = parameters(num, 0.1, 0.05, "curious")
    ring = graph.graph(params, b"session", b"root")
    table = ring.table()
    assert table.shape == (num, params.degree)
    for index in range(num):
        assert (table[index] == ring.neighbours(index)).all()
        assert index not in table[index]
        assert len(set(table[index].tolist())) == params.degree
        assert all(index in table[other] for other in table[index])
    if num > 64:
        assert (table != graph.graph(params, b"session", b"other root").table()).any()
        assert (table != graph.graph(params, b"other session", b"root").table()).any()


# Tree


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 33])
def test_proofs_hold_for_their_leaf_and_place_only(num: int) -> None:
    leaves = [bytes([i]) * 4 for i in range(num)]
    levels = tree.build(leaves)
    root = tree.root(levels, num)
    for i in range(num):
        proof = tree.proof(levels, i)
        assert tree.proves(proof, leaves[i], i, num, root)
        assert not tree.proves(proof, b"other", i, num, root)
        assert not tree.proves(proof, leaves[i], i, num + 1, root)
        assert not tree.proves(proof + bytes(32), leaves[i], i, num, root)
        if num > 1:
            assert not tree.proves(proof, leaves[i], i ^ 1, num, root)
            assert not tree.proves(proof[:-1], leaves[i], i, num, root)


# Wire


def test_session_depends_on_everything() -> None:
    fed = federation(4)
    base = fed.invite
    others = [
        msgspec.structs.replace(base, run="other"),
        msgspec.structs.replace(base, round=4),
        msgspec.structs.replace(base, attempt=1),
        msgspec.structs.replace(base, model=bytes(32)),
        msgspec.structs.replace(base, cohort=wire.cohort([1, 2, 3])),
        fed.with_config(length=6).invite,
        fed.with_config(dropouts=0.2).invite,
        fed.with_config(encoding=Encoding(2.0, 16)).invite,
    ]
    assert len({wire.session_id(invite) for invite in [base, *others]}) == 1 + len(others)


def test_envelopes_are_exact() -> None:
    envelope = wire.sign(identity(1), 1, bytes(32), wire.Consent(bytes(32)))
    data = wire.encode(envelope)
    assert wire.read_envelope(data, len(data)) == envelope
    assert wire.read_body(envelope, wire.Consent) == wire.Consent(bytes(32))
    assert wire.signed_by(public(1), envelope)
    assert not wire.signed_by(public(2), envelope)
    assert not wire.signed_by(public(1), msgspec.structs.replace(envelope, sender=2))
    assert not wire.signed_by(public(1), msgspec.structs.replace(envelope, session=b"\1" * 32))
    with pytest.raises(Abort) as abort:
        wire.read_envelope(data, len(data) - 1)
    assert abort.value.reason is Reason.MALFORMED
    with pytest.raises(Abort) as abort:
        wire.read_body(envelope, wire.Advert)
    assert abort.value.reason is Reason.UNEXPECTED
    for bad in (data + b"\0", data[:-1], b"", b"\xc0"):
        with pytest.raises(Abort):
            wire.read_envelope(bad, 1 << 20)


def test_claimed_lengths_allocate_no_memory() -> None:
    head = wire.encode(wire.Envelope(1, bytes(32), b"", bytes(64)))
    claims = [
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x94\x01\xc4\x20" + bytes(32) + b"\xc6\xff\xff\xff\xff",
    ]
    claims += [b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", head[:1] + b"\xdd\xff\xff\xff\xff"]
    tracemalloc.start()
    for claim in claims:
        with pytest.raises(Abort):
            wire.read_envelope(claim, 1 << 20)
        with pytest.raises(Abort):
            wire.read_body(wire.Envelope(1, bytes(32), claim, bytes(64)), wire.Masked)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 64])
def test_bits(num: int) -> None:
    bits = np.random.default_rng(num).random(num) < 0.5
    data = wire.pack_bits(bits)
    assert (wire.read_bits(data, num) == bits).all()
    with pytest.raises(Abort):
        wire.read_bits(data + b"\0", num)
    if num % 8:
        with pytest.raises(Abort):
            wire.read_bits(data[:-1] + bytes([data[-1] | 0x80]), num)


def test_cohorts_ascend() -> None:
    fed = federation(3)
    for cohort in (wire.cohort([1, 2])[:-1], wire.cohort([1, 1]), wire.cohort([5, 9])[::-1]):
        with pytest.raises(Abort) as abort:
            wire.read_cohort(msgspec.structs.replace(fed.invite, cohort=cohort))
        assert abort.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("num", [3, 11, 15, 19, 8000])  # the body's length takes one byte, two or four
def test_what_is_counted_of_an_invitation_does_not_depend_on_the_name_of_the_run(num: int) -> None:
    fed, cohort, sizes = federation(3), wire.cohort(list(range(num))), set[int]()
    for name in ("a", "b" * 31, "c" * 32, "d" * 64):
        invite = msgspec.structs.replace(fed.invite, run=name, cohort=cohort)
        envelope = wire.sign(identity(0), wire.SERVER, wire.session_id(invite), invite)
        sizes.add(len(wire.encode(envelope)) + wire.name_padding(invite))
    assert sizes == {len(wire.encode(envelope))}  # of the longest name
