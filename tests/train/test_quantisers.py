"""The quantisers of the uplink keep their equations: bias, error, bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.core.errors import DataError, PlanError
from atoll.core.messages import Payload
from atoll.core.params import ParamSpec, spec_of
from atoll.core.parts import Part
from atoll.core.transform import Chain, Encoding, chain
from atoll.transforms.bits import num_packed, pack_bits, unpack_bits
from atoll.transforms.eden import normal_points
from atoll.transforms.rotate import block_shape, hadamard

MODEL = spec_of(nn.Linear(3, 2))
NOTHING = ParamSpec((), 0, torch.float32)
SIX = [
    Part("quantise"),
    Part("quantise", bits=3, per="whole"),
    Part("quantise", bits=11, rounding="nearest"),
    Part("qsgd"),
    Part("half"),
    Part("half", format="bfloat16"),
    Part("rotate"),
    Part("eden"),
    Part("eden", bits=3, scale="least_squares"),
]


def steps(*parts: Part) -> Chain:
    return chain(*(part.build("transforms") for part in parts))


def sent(codec: Chain, vector: Tensor, *, seed: int = 0, attempt: int = 0, spec: ParamSpec = MODEL) -> Payload:
    return codec.encode(vector, {}, Encoding(spec, attempt, np.random.default_rng(seed)))[0]


def through(codec: Chain, vector: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(sent(codec, vector, seed=seed))


def squared_error(codec: Chain, vector: Tensor, seed: int = 0) -> float:
    return float((through(codec, vector, seed) - vector).double().square().sum())


@settings(max_examples=150, deadline=None)
@given(bits=st.integers(1, 16), num=st.integers(0, 300), seed=st.integers(0, 10**6))
def test_bits_come_back_and_fill_their_bytes(bits: int, num: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(2**bits, size=num).astype(np.int32))
    codes = codes.to(torch.uint8) if bits <= 8 else codes
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == num_packed(num, bits) == math.ceil(num * bits / 8)
    assert torch.equal(unpack_bits(packed, bits, num), codes)
    with pytest.raises(DataError, match="same options"):
        unpack_bits(packed, bits, num + 8)


@pytest.mark.parametrize(
    "part", [Part("quantise", bits=b) for b in (1, 2, 5, 8, 9, 16)] + [Part("qsgd"), Part("qsgd", levels=1)]
)
def test_stochastic_rounding_is_unbiased(part: Part) -> None:
    """The mean of 10^6 draws is within four standard errors; the value itself is rounded to float32."""
    value = 0.337
    vector = torch.full((1_000_000,), value, dtype=torch.float64)
    vector[0], vector[1] = -1.0, 2.0
    error = through(steps(part), vector)[2:] - value
    assert float(error.std()) > 0
    assert abs(float(error.mean())) < 4 * float(error.std()) / 1000


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12, 16])
def test_the_error_of_values_that_lie_evenly_in_their_cells(bits: int) -> None:
    """2 d s^2 / (3 (2^b - 1)^2), with s the half range."""
    num, half_range = 400_000, 1.5
    torch.manual_seed(bits)
    vector = (torch.rand(num, dtype=torch.float64) * 2 - 1) * half_range + 4
    vector[0], vector[1] = 4 - half_range, 4 + half_range
    formula = 2 * num * half_range**2 / (3 * (2**bits - 1) ** 2)
    assert squared_error(steps(Part("quantise", bits=bits, per="whole")), vector) == pytest.approx(formula, rel=0.01)


def test_the_error_of_normal_values() -> None:
    """At one bit it is s^2 - 1 a value, 1.5 (1 - 1/s^2) times the formula; from three bits on it is the formula."""
    torch.manual_seed(0)
    vector = torch.randn(200_000)
    half_range = float(vector.max() - vector.min()) / 2
    ratio = {
        bits: squared_error(steps(Part("quantise", bits=bits, per="whole")), vector)
        / (2 * len(vector) * half_range**2 / (3 * (2**bits - 1) ** 2))
        for bits in (1, 2, 3, 4, 8)
    }
    assert ratio[1] == pytest.approx(1.5 * (1 - half_range**-2), rel=0.01)
    assert ratio[1] == pytest.approx(1.42, abs=0.02)
    assert ratio[2] == pytest.approx(1.06, abs=0.02)
    assert all(ratio[bits] == pytest.approx(1, abs=0.01) for bits in (3, 4, 8))


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    bits=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_no_input_errs_more_than_the_bound(values: list[float], bits: int, seed: int) -> None:
    """At most d s^2 / (2^b - 1)^2 in the mean, and one step a value in any draw (half a step to the nearest point)."""
    vector = torch.tensor(values, dtype=torch.float64).repeat(20_000 // len(values))
    step = (max(values) - min(values)) / (2**bits - 1)
    error = through(steps(Part("quantise", bits=bits, per="whole")), vector, seed) - vector
    noise = 5 * float(error.square().std()) / math.sqrt(len(vector))
    assert float(error.square().mean()) <= step**2 / 4 * (1 + 1e-6) + noise
    assert float(error.abs().max()) <= step * (1 + 1e-6)
    nearest = through(steps(Part("quantise", bits=bits, per="whole", rounding="nearest")), vector) - vector
    assert float(nearest.abs().max()) <= step / 2 * (1 + 1e-6)


def test_each_tensor_has_its_own_range_and_extra_vectors_one_more() -> None:
    vector = torch.cat([torch.linspace(-1, 1, 6), torch.tensor([1e3, 2e3]), torch.full((5,), 7.0)])
    payload = sent(steps(Part("quantise")), vector)
    assert payload.sides[0]["sizes"].tolist() == [6, 2, 5]
    back = steps(Part("quantise")).decode(payload)
    torch.testing.assert_close(back[6:], vector[6:])
    assert float((back[:6] - vector[:6]).abs().max()) <= 2 / 255 + 1e-6
    assert sent(steps(Part("quantise")), vector[:5]).sides[0]["sizes"].tolist() == [5]


def test_qsgd_has_the_variance_of_its_levels_and_keeps_zeros() -> None:
    torch.manual_seed(1)
    vector = torch.randn(100_000) * (torch.rand(100_000) < 0.5)
    for levels in (100, 1000, 20_000):
        exact = (vector.double().abs() / vector.double().norm() * levels).frac()
        expected = float((exact * (1 - exact)).sum() * (vector.double().norm() / levels) ** 2)
        back = through(steps(Part("qsgd", levels=levels)), vector)
        assert float((back - vector).double().square().sum()) == pytest.approx(expected, rel=0.05)
        assert not back[vector == 0].any()
        assert ((back * vector) >= 0).all()


@pytest.mark.parametrize("part", SIX, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_constant_and_zero_vectors_come_back(part: Part, dtype: torch.dtype) -> None:
    codec = steps(part)
    for num in (0, 1, 7, 8, 9, 5000):
        zeros = torch.zeros(num, dtype=dtype)
        assert torch.equal(through(codec, zeros), zeros)
        back = through(codec, zeros + 0.5)
        assert back.dtype == dtype
        assert back.shape == (num,)
        if part.name in ("quantise", "half"):
            assert torch.equal(back, zeros + 0.5)
        if num == 1:
            torch.testing.assert_close(back, zeros + 0.5)


@pytest.mark.parametrize("part", SIX, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(part: Part, bad: float) -> None:
    vector = torch.randn(500)
    vector[77] = bad
    assert not through(steps(part), vector)[77].isfinite()


@pytest.mark.parametrize("part", SIX, ids=repr)
def test_packed_bytes_end_a_chain(part: Part) -> None:
    with pytest.raises(PlanError, match=f"put {part.name} earlier"):
        through(steps(Part("quantise"), part), torch.randn(8))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Part("quantise", bits=0), r"quantise: bits must be in \[1, 16\], got"),
        (Part("quantise", bits=17), r"quantise: bits must be in \[1, 16\], got"),
        (Part("quantise", rounding="up"), "rounding must be"),
        (Part("quantise", per="row"), "per must be"),
        (Part("qsgd", levels=0), "levels"),
        (Part("half", format="float8"), "format must be"),
        (Part("eden", bits=5), r"eden: bits must be in \[1, 4\], got"),
        (Part("eden", scale="no"), "scale must be"),
    ],
)
def test_wrong_options_are_refused(part: Part, wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        steps(part)


@pytest.mark.parametrize("num", [1, 2, 100, 4097, 70_001])
def test_rotation_keeps_lengths_and_angles_and_comes_back(num: int) -> None:
    torch.manual_seed(num)
    a, b = torch.randn(num, dtype=torch.float64), torch.randn(num, dtype=torch.float64)
    codec = steps(Part("rotate"))
    ra, rb = sent(codec, a), sent(codec, b, seed=1)
    assert ra.carrier.numel() == math.prod(block_shape(num))
    assert float(ra.carrier @ rb.carrier) == pytest.approx(float(a @ b), abs=1e-9 * num)
    assert float(ra.carrier.norm()) == pytest.approx(float(a.norm()))
    torch.testing.assert_close(codec.decode(ra), a)
    torch.testing.assert_close(codec.decode(Payload(ra.carrier + rb.carrier, rb.sides)), a + b)
    other = sent(codec, a, attempt=1).carrier
    assert num < 3 or not torch.allclose(other, ra.carrier)


def test_the_hadamard_matrix_is_the_one_of_the_books() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    book = two
    for _ in range(4):
        book = torch.kron(two, book)
    torch.testing.assert_close(hadamard(torch.eye(32, dtype=torch.float64)), book / 32**0.5)


def test_padding_is_small() -> None:
    for num in [*range(512, 9000, 7), 65_536, 199_210, 10_000_001]:
        size, count = block_shape(num)
        assert num <= size * count < num + size
        assert size * count <= num * 9 / 8


def test_a_rotation_saves_a_vector_with_outliers() -> None:
    torch.manual_seed(0)
    vector = torch.randn(50_000) * 1e-3
    vector[torch.randperm(50_000)[:20]] = 1.0
    plain = squared_error(steps(Part("quantise", bits=4, per="whole")), vector)
    assert squared_error(steps(Part("rotate"), Part("quantise", bits=4, per="whole")), vector) < plain / 10


@pytest.mark.parametrize("num", [4096, 98_304])
def test_one_bit_has_the_error_of_the_paper(num: int) -> None:
    """(pi/2 - 1) |x|^2 with the unbiased scale, (1 - 2/pi) |x|^2 with the other."""
    torch.manual_seed(num)
    vector = torch.randn(num)
    square = float(vector.square().sum())
    unbiased, least = Part("eden"), Part("eden", scale="least_squares")
    assert squared_error(steps(unbiased), vector) / square == pytest.approx(math.pi / 2 - 1, rel=0.04)
    assert squared_error(steps(least), vector) / square == pytest.approx(1 - 2 / math.pi, rel=0.04)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_more_bits_have_the_error_of_the_best_points(bits: int, distortion: float) -> None:
    """Max 1960, table I; the unbiased scale makes D / (1 - D) of it."""
    torch.manual_seed(bits)
    vector = torch.randn(98_304)
    square = float(vector.square().sum())
    expected = distortion / (1 - distortion)
    assert squared_error(steps(Part("eden", bits=bits)), vector) / square == pytest.approx(expected, rel=0.02)
    torch.testing.assert_close(normal_points(bits), -normal_points(bits).flip(0))


@pytest.mark.parametrize("bits", [1, 2])
def test_eden_is_right_in_the_mean_over_rotations(bits: int) -> None:
    """The unbiased scale averages out over clients, the other shrinks by 2 / pi at one bit."""
    torch.manual_seed(0)
    vector = torch.randn(1000) ** 3
    draws = torch.stack([through(steps(Part("eden", bits=bits)), vector, seed) for seed in range(400)])
    error = draws.mean(0) - vector
    assert float((error / (draws.std(0) / 20)).square().mean()) == pytest.approx(1, abs=0.2)
    least = Part("eden", bits=bits, scale="least_squares")
    mean = torch.stack([through(steps(least), vector, seed) for seed in range(400)]).mean(0)
    shrunk = float(mean @ vector / (vector @ vector))
    assert shrunk == pytest.approx({1: 2 / math.pi, 2: 1 - 0.1175}[bits], rel=0.03)


@pytest.mark.parametrize("num", [8, 1000, 5001])
def test_payloads_have_the_bytes_that_the_bits_say(num: int) -> None:
    def size(*parts: Part) -> int:
        payload = sent(steps(*parts), torch.randn(num), spec=NOTHING)
        tensors = [payload.carrier, *(tensor for side in payload.sides for tensor in side.values())]
        return sum(tensor.nbytes for tensor in tensors)

    padded = math.prod(block_shape(num))
    for bits in (1, 3, 8, 12, 16):
        assert size(Part("quantise", bits=bits)) == math.ceil(num * bits / 8) + 16
    assert size(Part("quantise", bits=4, per="whole")) == math.ceil(num / 2) + 16
    assert size(Part("qsgd")) == num + 12
    assert size(Part("qsgd", levels=1)) == math.ceil(num / 4) + 12
    assert size(Part("half")) == 2 * num
    assert size(Part("rotate")) == 4 * padded + 16
    assert size(Part("rotate"), Part("quantise", bits=4)) == padded // 2 + 16 + 16
    for bits in (1, 2, 3, 4):
        assert size(Part("eden", bits=bits)) == padded * bits // 8 + 4 * block_shape(num)[1] + 16


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.integers(1, 4), power=st.integers(1, 9), num=st.integers(1, 3000))
def test_the_declared_norms_hold_for_spiky_vectors(seed: int, bits: int, power: int, num: int) -> None:
    vector = torch.from_numpy(np.random.default_rng(seed).standard_normal(num)) ** power
    for part in (Part("eden", bits=bits), Part("eden", bits=bits, scale="least_squares"), Part("half")):
        codec = steps(part)
        assert float(through(codec, vector, seed).norm()) <= codec.sensitivity(float(vector.norm())) * (1 + 1e-9)


def test_what_is_declared() -> None:
    assert steps(Part("rotate")).linear
    assert steps(Part("rotate")).sensitivity(3.0) == 3.0
    assert not any(steps(part).linear for part in SIX if part.name != "rotate")
    assert steps(Part("clip", norm=1.0), Part("quantise")).sensitivity() == math.inf
    assert steps(Part("eden", scale="least_squares")).sensitivity(2.0) == 2.0
    assert steps(Part("half")).sensitivity(1e6) == math.inf
