"""What every transform must satisfy. Shapes: V values of a packed vector."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError
from atoll.core.messages import Payload, State
from atoll.core.params import spec_of
from atoll.core.transform import Chain, Encoding, Transform, chain
from atoll.core.wire import pack, unpack
from atoll.testing.law import Member, law, must, must_be_close, must_be_equal, must_be_state, written
from atoll.testing.runs import must_repeat, small_plan
from atoll.train.seeded import seeded

CONTRACT = Transform
SPEC = spec_of(nn.Linear(9, 7))
V = SPEC.num_params
TRIES, DRAWS = 20, 3000


def _encoding(seed: int = 0, attempt: int = 0) -> Encoding:
    return Encoding(SPEC, attempt, np.random.default_rng(seed))


def _vector(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def _vectors() -> Iterator[tuple[int, Tensor]]:
    """Draw vectors of lengths from 0.01 to 10,000."""
    for seed in range(TRIES):
        yield seed, _vector(seed, 10.0 ** (seed % 7 - 3))


def _sent(steps: Chain, vector_V: Tensor, memory: State, seed: int = 0, attempt: int = 0) -> tuple[Tensor, State]:
    """Encode, send over the wire, and decode."""
    payload, memory = steps.encode(vector_V, memory, _encoding(seed, attempt))
    data = pack(payload)
    return steps.decode(unpack(data, max_bytes=len(data))), memory


@law()
def what_is_decoded_has_the_shape_and_the_type_of_the_vector(member: Member) -> None:
    """Send vectors of float32 and float64 over the wire, for three rounds."""
    steps = chain(member.build())
    for dtype in (torch.float32, torch.float64):
        memory: State = {}
        for attempt in range(3):
            vector_V = _vector(attempt, dtype=dtype)
            found_V, memory = _sent(steps, vector_V, memory, attempt=attempt)
            must(
                found_V.shape == vector_V.shape and found_V.dtype == dtype,
                f"{tuple(vector_V.shape)} values of {dtype} come out as {tuple(found_V.shape)} of {found_V.dtype}: "
                "let decode undo encode",
            )


@law()
def the_norm_stays_within_its_sensitivity(member: Member) -> None:
    """Send vectors of many lengths, round after round: none comes out longer than `sensitivity` says."""
    steps, memory = chain(member.build()), dict[str, Tensor]()
    longest = 0.0
    for seed, vector_V in _vectors():
        fresh_V, _ = _sent(steps, vector_V, {}, seed)
        later_V, memory = _sent(steps, vector_V, memory, seed, attempt=seed)
        longest = max(longest, float(vector_V.norm()))
        for found_V, l2_in in ((fresh_V, float(vector_V.norm())), (later_V, longest)):
            bound, length = steps.sensitivity(l2_in), float(found_V.norm())
            must(
                length <= bound * (1 + 1e-5),
                f"vectors of length {l2_in:g} at most become {length:g} long, and sensitivity says {bound:g}: "
                "correct it, or leave it out, which promises nothing",
            )


@law()
def encoding_depends_on_its_arguments_alone(member: Member) -> None:
    """Encode twice with the same generator, and with other states of the generators of torch and NumPy."""
    vector_V = _vector(1)
    payloads = []
    for seed in (1, 2):
        with seeded(seed):
            payloads.append(pack(chain(member.build()).encode(vector_V, {}, _encoding(3))[0]))
    must(payloads[0] == payloads[1], "the same vector is encoded in two ways: draw from encoding.rng")


@law()
def memory_is_a_value(member: Member) -> None:
    """Go on after two rounds from a checkpoint, with a transform that was built anew, to the same bytes."""
    steps, memory = chain(member.build()), dict[str, Tensor]()
    for attempt in range(2):
        memory = steps.encode(_vector(attempt), memory, _encoding(attempt, attempt))[1]
        must_be_state(memory, "the memory that encode returns")
    saved = written(memory)
    went_on, after = steps.encode(_vector(2), memory, _encoding(2, 2))
    resumed, after_resumed = chain(member.build()).encode(_vector(2), saved, _encoding(2, 2))
    why = "a resumed run differs: keep what it remembers in the memory that encode takes and returns"
    must(pack(resumed) == pack(went_on), why)
    must_be_equal(after_resumed, after, why)
    must_be_equal(memory, written(saved), "encode writes to the memory that it was given: return a new one")


@law()
def nothing_that_comes_in_is_written_to(member: Member) -> None:
    """Encode and decode; vector, carrier and side stay as they were."""
    step: Transform = member.build()
    vector_V = _vector(4)
    carrier, side, _ = step.encode(vector_V, step.init(V), _encoding())
    must(torch.equal(vector_V, _vector(4)), "encode writes to the vector: work on a copy")
    before = pack(Payload(carrier, (side,)))
    once_V, twice_V = step.decode(carrier, side).clone(), step.decode(carrier, side)
    must_be_close(twice_V, once_V, "decoding twice gives two vectors: do not write to what comes in")
    must(pack(Payload(carrier, (side,))) == before, "decode writes to what comes in: work on a copy")


@law()
def an_empty_vector_is_sent_or_refused(member: Member) -> None:
    """Send nothing, as a step before may leave it; a transform that needs the whole model refuses it with advice."""
    try:
        found_V, _ = _sent(chain(member.build()), torch.zeros(0), {})
    except PlanError:
        return
    must(found_V.shape == (0,), f"nothing becomes {found_V.numel()} values")


@law()
def what_is_no_number_shows(member: Member) -> None:
    """Send NaN: it must not come out as numbers, or a broken client could not be told."""
    found_V, _ = _sent(chain(member.build()), torch.full((V,), math.nan), {})
    must(not bool(found_V.isfinite().all()), "a vector of NaN is decoded to numbers: let NaN through")


@law(when="linear")
def sums_of_carriers_decode_to_sums(member: Member) -> None:
    """Add the carriers of three clients, as under a mask: with any one's side they decode to the sum."""
    step: Transform = member.build()
    encoded = [step.encode(_vector(seed), step.init(V), _encoding(seed)) for seed in range(3)]
    expected_V = torch.stack([step.decode(carrier, side) for carrier, side, _ in encoded]).sum(0)
    total = torch.stack([carrier for carrier, _, _ in encoded]).sum(0)
    for _, side, _ in encoded:
        why = "it is said to be linear, but a sum of carriers does not decode to the sum"
        must_be_close(step.decode(total, side), expected_V, why, atol=1e-5, rtol=1e-4)


@law(when="unbiased")
def the_mean_is_right(member: Member) -> None:
    """Encode one vector many times: the mean is within six standard errors of it."""
    steps, vector_V = chain(member.build()), _vector(5)
    rng = np.random.default_rng(5)
    found = [steps.decode(steps.encode(vector_V, {}, Encoding(SPEC, n, rng))[0]) for n in range(DRAWS)]
    draws_NV = torch.stack(found).double()
    error_V = (draws_NV.mean(0) - vector_V.double()).abs() / (draws_NV.std(0) / math.sqrt(DRAWS) + 1e-6)
    worst = float(error_V.max())
    must(worst < 6, f"it is said to be unbiased, but a value is off by {worst:.1f} standard errors after {DRAWS} draws")


@law(when="contractive")
def the_error_is_no_longer_than_the_vector(member: Member) -> None:
    """Send vectors of many lengths, each as the first."""
    steps = chain(member.build())
    for seed, vector_V in _vectors():
        error = float((_sent(steps, vector_V, {}, seed)[0] - vector_V).norm() / vector_V.norm())
        must(error <= 1 + 1e-5, f"it is said to be contractive, but the error is {error:g} times as long as the vector")


@law()
def any_number_of_workers_gives_the_same_run(member: Member) -> None:
    """Run a small plan with this step on the way up, or on the way down if it sends differences."""
    way = "downlink" if member.build().against_known else "uplink"
    must_repeat(small_plan(**{way: [member.part]}))
