"""Payloads survive the wire bit for bit, and nothing that comes over it can do harm."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import random
import re
import string
import struct
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.messages import Payload
from atoll.core.wire import CHUNK, DTYPES, HEADER, WireError, pack, packed_size, unpack

LIMIT = 1 << 20
MIB = 1 << 20
both = pytest.mark.parametrize("compress", [False, True])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    top = 2 if dtype is torch.bool else 256
    data = torch.randint(0, top, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


names = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)
payloads = st.builds(Payload, tensors(), st.lists(st.dictionaries(names, tensors(), max_size=4), max_size=4).map(tuple))


def bits(payload: Payload) -> object:
    """All there is to a payload, NaNs included."""
    return seen(payload.carrier), [{name: seen(tensor) for name, tensor in side.items()} for side in payload.sides]


def seen(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.flatten().clone().view(torch.uint8).tolist()


@both
@given(payload=payloads)
@settings(max_examples=150, deadline=None)
def test_unpack_undoes_pack(compress: bool, payload: Payload) -> None:
    data = pack(payload, compress=compress)
    assert bits(unpack(data, max_bytes=LIMIT)) == bits(payload)
    assert len(data) <= packed_size(payload)


@given(payload=payloads)
@settings(max_examples=150, deadline=None)
def test_a_payload_has_one_message_of_the_predicted_size(payload: Payload) -> None:
    backwards = Payload(payload.carrier, tuple(dict(reversed(side.items())) for side in payload.sides))
    assert pack(backwards) == pack(payload)
    assert len(pack(payload)) == packed_size(payload)


def test_the_size_is_counted_without_a_copy() -> None:
    """The tensor would fill 4 TB."""
    assert packed_size(Payload(torch.zeros(1).expand(10**12))) == HEADER.size + 10 + 4 * 10**12


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::5],
        torch.arange(12.0)[1::5][:1],
        torch.zeros(1).expand(7),
        torch.ones(3, requires_grad=True),
        torch.full((2,), 2.5, dtype=torch.bfloat16)[1:],
    ],
    ids=["transposed", "strided", "one of many", "expanded", "with gradient", "with offset"],
)
def test_scattered_tensors_arrive_dense(tensor: Tensor) -> None:
    there = unpack(pack(Payload(tensor)), max_bytes=LIMIT).carrier
    assert torch.equal(there, tensor)
    assert there.is_contiguous()


@both
def test_tensors_own_their_memory(compress: bool) -> None:
    data = bytearray(pack(Payload(torch.zeros(999), ({"a": torch.zeros(3, dtype=torch.int8)},)), compress=compress))
    there = unpack(data, max_bytes=LIMIT)
    data[:] = b"\xff" * len(data)
    for tensor in (there.carrier, there.sides[0]["a"]):
        assert not tensor.any()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.add_(1).all()


@both
def test_tensors_that_cross_chunks(compress: bool) -> None:
    """Chunks are cut regardless of where tensors begin, and the last one may be full or not."""
    first = torch.arange(CHUNK // 8 * 3 // 2)
    for rest in (CHUNK // 2, CHUNK // 2 - 3):
        payload = Payload(
            first, ({"a": torch.ones(5, dtype=torch.int8), "b": torch.zeros(rest - 5, dtype=torch.uint8)},)
        )
        data = pack(payload, compress=compress)
        there = unpack(data, max_bytes=packed_size(payload))
        assert torch.equal(there.carrier, first)
        assert all(torch.equal(there.sides[0][name], tensor) for name, tensor in payload.sides[0].items())
        assert (len(data) < packed_size(payload)) == compress


def test_incompressible_payloads_are_sent_uncompressed() -> None:
    noise = Payload(torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    assert pack(noise, compress=True) == pack(noise)


def test_the_largest_that_is_allowed() -> None:
    empty = torch.zeros(0)
    for payload in (
        Payload(torch.ones((1,) * 8), ({},) * 64),
        Payload(empty, ({"n" * 255: empty}, {str(number): empty for number in range(1022)})),
    ):
        assert bits(unpack(pack(payload), max_bytes=packed_size(payload))) == bits(payload)


UNSENDABLE = {
    "complex": (Payload(torch.zeros(1, dtype=torch.complex64)), "complex64"),
    "sparse": (Payload(torch.eye(2).to_sparse()), "make it dense"),
    "nine dimensions": (Payload(torch.zeros((1,) * 9)), "at most 8 dimensions"),
    "65 sides": (Payload(torch.zeros(1), ({},) * 65), "at most 64 sides"),
    "1025 tensors": (Payload(torch.zeros(1), ({str(n): torch.zeros(1) for n in range(1024)},)), "1024 tensors"),
} | {
    f"name {name[:9]!r}": (Payload(torch.zeros(1), ({name: torch.zeros(1)},)), "printable ASCII")
    for name in ("", "a b", "ä", "a\n", "\ud800", "n" * 256)
}


@pytest.mark.parametrize(("payload", "reason"), UNSENDABLE.values(), ids=UNSENDABLE)
@pytest.mark.parametrize("write", [pack, packed_size])
def test_pack_refuses_what_unpack_would(write: Callable[[Payload], object], payload: Payload, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        write(payload)


def message(
    rest: bytes, *, magic: bytes = b"ATOL", version: int = 1, flags: int = 0, sides: int = 0, size: int | None = None
) -> bytes:
    """A message written by hand, by default with the right size."""
    return struct.pack("<4sBBHQ", magic, version, flags, sides, 16 + len(rest) if size is None else size) + rest


def row(code: int, *dims: int, num_dims: int | None = None) -> bytes:
    return struct.pack(f"<BB{len(dims)}Q", code, len(dims) if num_dims is None else num_dims, *dims)


def side(*names: bytes, num: int | None = None) -> bytes:
    """Tensors of no bytes."""
    rows = b"".join(bytes([len(name)]) + name + row(2, 0) for name in names)
    return struct.pack("<H", len(names) if num is None else num) + rows


GOOD = message(row(2, 2) + b"\x01\x02")
ATTACKS = {
    "nothing": (b"", "not a payload"),
    "half a header": (GOOD[:15], "not a payload"),
    "wrong magic": (message(row(2, 0), magic=b"ATOM"), "not a payload"),
    "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not a payload"),
    "version 0": (message(row(2, 0), version=0), "version 0"),
    "version 2": (message(row(2, 0), version=2), "version 2"),
    "unknown flag": (message(row(2, 0), flags=2), "flags 0x02"),
    "all flags": (message(row(2, 0), flags=255), "flags 0xff"),
    "declared too large": (message(row(2, 0), size=LIMIT + 1), "allowed"),
    "declared 2^64 - 1": (message(row(2, 0), size=2**64 - 1), "allowed"),
    "declared more than there is": (message(row(2, 9) + b"12345678", size=35), "35 bytes declared, got 34"),
    "one byte too many": (GOOD + b"\0", "28 bytes declared, got 29"),
    "trailing and declared": (message(row(2, 2) + b"123"), "29 bytes declared, 28 described"),
    "too little and declared": (message(row(2, 2) + b"1"), "27 bytes declared, 28 described"),
    "no table": (message(b""), "cut off"),
    "table cut in dimensions": (message(row(2, 1, num_dims=2)), "cut off"),
    "dtype 0": (message(row(0, 0)), "unknown dtype 0"),
    "dtype 11": (message(row(11, 0)), "unknown dtype 11"),
    "dtype 255": (message(row(255, 0)), "unknown dtype 255"),
    "nine dimensions": (message(row(2, *[1] * 9) + b"1"), "more than 8 dimensions"),
    "255 dimensions": (message(row(2, num_dims=255)), "more than 8 dimensions"),
    "huge dimension": (message(row(2, 2**40)), "allowed"),
    "dimension of -1": (message(row(2, 2**64 - 1)), "allowed"),
    "-1 times -1 is one": (message(row(2, 2**64 - 1, 2**64 - 1) + b"1"), "allowed"),
    "product of 2^64 is none": (message(row(2, 2**32, 2**32)), "allowed"),
    "product of 2^64 + 2": (message(row(2, 2, 2**63 + 1) + b"12"), "allowed"),
    "bytes of 2^64 are none": (message(row(10, 2**61)), "allowed"),
    "product of 2^512": (message(row(2, *[2**63] * 8)), "allowed"),
    "huge but empty": (message(row(2, 0, 2**63, 2**63)), "allowed"),
    "bool of two": (message(row(1, 2) + b"\x01\x02"), "neither 0 nor 1"),
    "65 sides": (message(row(2, 0) + side() * 65, sides=65), "at most 64"),
    "65535 sides": (message(row(2, 0), sides=65535), "at most 64"),
    "missing side": (message(row(2, 0) + side(), sides=2), "cut off"),
    "side not counted": (message(row(2, 0) + side() + side(), sides=1), "30 bytes declared, 28 described"),
    "1025 tensors": (message(row(2, 0) + side(*(b"%04d" % n for n in range(1024))), sides=1), "more than 1024"),
    "65535 tensors declared": (message(row(2, 0) + side(num=65535), sides=1), "more than 1024"),
    "missing tensor": (message(row(2, 0) + side(b"a", num=2), sides=1), "cut off"),
    "name cut off": (message(row(2, 0) + b"\x01\x00\xffabc", sides=1), "cut off"),
    "empty name": (message(row(2, 0) + side(b""), sides=1), "printable ASCII"),
    "name of NUL": (message(row(2, 0) + side(b"a\0"), sides=1), "printable ASCII"),
    "name of UTF-8": (message(row(2, 0) + side("ä".encode()), sides=1), "printable ASCII"),
    "name with line break": (message(row(2, 0) + side(b"a\n"), sides=1), "printable ASCII"),
    "name twice": (message(row(2, 0) + side(b"a", b"a"), sides=1), "unique and in ascending order"),
    "names out of order": (message(row(2, 0) + side(b"b", b"a"), sides=1), "ascend"),
}


@pytest.mark.parametrize(("data", "reason"), ATTACKS.values(), ids=ATTACKS)
def test_attacks_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(data, max_bytes=LIMIT)


def test_a_hand_made_message_is_read() -> None:
    """Or the attacks might be refused for the way in which they are written."""
    assert unpack(GOOD, max_bytes=len(GOOD)).carrier.tolist() == [1, 2]
    named = unpack(message(row(2, 0) + side(b"a", b"b") + side(b"a"), sides=2), max_bytes=LIMIT)
    assert [list(tensors) for tensors in named.sides] == [["a", "b"], ["a"]]
    with pytest.raises(WireError, match="28 bytes, 27 are allowed"):
        unpack(GOOD, max_bytes=len(GOOD) - 1)


def test_no_limit_is_too_large_to_be_safe() -> None:
    with pytest.raises(WireError, match="allowed"):
        unpack(message(row(2, 0, 2**63)), max_bytes=2**64)


def frame(promised: int, *blocks: bytes, window: int | None = None) -> bytes:
    """A zstd frame written by hand (RFC 8878, section 3.1.1); `window` is its window descriptor."""
    start = b"\xe0" if window is None else bytes([0xC0, window])
    return b"\x28\xb5\x2f\xfd" + start + struct.pack("<Q", promised) + b"".join(blocks)


def rle(num: int, *, last: bool = True) -> bytes:
    """Return a block of `num` zeros."""
    return (last | 1 << 1 | num << 3).to_bytes(3, "little") + b"\0"


def squeezed(num: int, *frames: bytes, size: int | None = None, code: int = 2) -> bytes:
    """A compressed message of one tensor of `num` bytes."""
    rest = row(code, num) + b"".join(struct.pack("<I", len(part)) + part for part in frames)
    return message(rest, flags=1, size=16 + 10 + num if size is None else size)


def zeros(num: int) -> bytes:
    """Return a valid frame of `num` zeros."""
    sizes = [min(1 << 17, num - start) for start in range(0, num, 1 << 17)]
    return frame(num, *(rle(size, last=number == len(sizes)) for number, size in enumerate(sizes, 1)))


BOMBS = {
    "declared too large": (squeezed(2**40, zeros(CHUNK)), "allowed"),
    "tensor larger than declared": (squeezed(2000, zeros(1000), size=1026), "1026 bytes declared, 2026 described"),
    "longer than plain": (squeezed(10, zeros(10)), "36 bytes declared"),
    "more promised than due": (squeezed(1000, zeros(1001)), "1001 bytes, expected 1000"),
    "terabytes promised": (squeezed(1000, frame(2**40, rle(1 << 17))), "expected 1000"),
    "nothing promised": (squeezed(1000, b"\x28\xb5\x2f\xfd\x00\x58" + rle(1000)), "-1 bytes, expected 1000"),
    "more than promised": (squeezed(1000, frame(1000, rle(1000, last=False), rle(1 << 17))), "decompressed"),
    "less than promised": (squeezed(1000, frame(1000, rle(999))), "decompressed"),
    "window of 128 MB, cut": (squeezed(1000, frame(1000, rle(1000, last=False), window=17 << 3)), "too much memory"),
    "two frames in a chunk": (squeezed(1000, zeros(1000) + zeros(1000)), "unused data"),
    "bytes after the frame": (squeezed(1000, zeros(1000) + b"x"), "unused data"),
    "skippable frame": (squeezed(1000, b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"1234"), "0 bytes, expected 1000"),
    "chunk that is not zstd": (squeezed(1000, b"x" * 30), "not zstd"),
    "empty chunk": (squeezed(1000, b""), "not zstd"),
    "second chunk missing": (squeezed(CHUNK + 1, zeros(CHUNK)), "cut off"),
    "one chunk too large": (squeezed(CHUNK + 1, zeros(CHUNK + 1)), "expected 1048576"),
    "one chunk too many": (squeezed(1000, zeros(1000), zeros(1000)), "more bytes arrived"),
    "chunk cut off": (squeezed(1000, zeros(1000))[:-1], "cut off"),
    "unknown dictionary": (squeezed(1000, b"\x28\xb5\x2f\xfd\x61\x07\xe8\x02" + rle(1000)), "decompressed"),
}


@pytest.mark.parametrize(("data", "reason"), BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(data, max_bytes=2 * MIB)


def test_a_hand_made_frame_is_read() -> None:
    there = unpack(squeezed(CHUNK + 9, zeros(CHUNK), zeros(9)), max_bytes=2 * MIB).carrier
    assert there.numel() == CHUNK + 9
    assert not there.any()


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes the process grew at the worst moment; memory that others gave back does not serve again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmHWM")
    work()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_bombs_never_fill_more_than_the_limit() -> None:
    """Five kilobytes may become 60 MB where 64 are allowed, and nothing more."""
    limit, num = 64 * MIB, 60 * MIB
    honest = squeezed(num, *[zeros(CHUNK)] * 60)
    assert len(honest) < 5000
    assert num - 4 * MIB < peak_growth(lambda: unpack(honest, max_bytes=limit)) < limit + 4 * MIB

    late = squeezed(num, *[zeros(CHUNK)] * 59, frame(CHUNK, *[rle(1 << 17, last=False)] * 60))
    early = squeezed(num, *[frame(2**40, *[rle(1 << 17, last=False)] * 100)] * 60)
    large = squeezed(2**40, *[zeros(CHUNK)] * 60)
    for bomb, most in ((late, limit), (early, 0), (large, 0)):
        assert peak_growth(partial(refused, bomb, limit)) < most + 4 * MIB


def refused(data: bytes, limit: int) -> None:
    with pytest.raises(WireError):
        unpack(data, max_bytes=limit)


@both
def test_every_cut_is_refused(compress: bool) -> None:
    data = pack(Payload(torch.zeros(100), ({"a": torch.ones(3)}, {})), compress=compress)
    for length in range(len(data)):
        refused(data[:length], LIMIT)
    refused(data + b"\0", LIMIT)


FUZZ_LIMIT = 1 << 16
NUMBERS = [0, 1, 2, 3, 8, 9, 255, 256, 1024, 65535, 2**31, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 1]


def seeds() -> Iterator[bytes]:
    """Sound messages to start from."""
    sides = {"scale": torch.tensor(0.5), "mask": torch.tensor([True, False]), "low": torch.zeros(2, 0, 3)}
    several = Payload(torch.arange(5, dtype=torch.int8), (sides, {}, {"i": torch.arange(3)}))
    many = Payload(torch.ones(2, 2), ({letter: torch.zeros(0) for letter in string.ascii_letters},))
    for payload in (several, many, Payload(torch.tensor(1.0)), Payload(torch.zeros(300, 5), ({"a": torch.ones(9)},))):
        yield pack(payload)
        yield pack(payload, compress=True)


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """A message with one to four faults, half of them with the size put right so that they get past the header."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 4)):
        at, num = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 8, 30])
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                width = rng.choice([1, 2, 4, 8])
                data[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little")
            case 2:
                del data[at : at + num]
            case 3:
                data[at:at] = rng.randbytes(num)
            case 4:
                data[at:at] = data[at : at + num]
            case 5:
                other = rng.choice(corpus)
                data[at:] = other[rng.randrange(len(other)) :]
    if len(data) >= HEADER.size and rng.random() < 0.5:
        data[8:16] = struct.pack("<Q", len(data) + (rng.choice([0, 0, 5500]) if data[5] else 0))
    return bytes(data)


@pytest.mark.parametrize("num", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_refused_or_mean_what_they_say(num: int) -> None:
    """No other error, no hang, no memory beyond the limit; what is read is exactly what was there."""
    rng, corpus = random.Random(num), list(seeds())
    places, num_read, slowest = set(), 0, 0.0
    tracemalloc.start()
    for _ in range(num):
        data = mutated(rng, corpus)
        tracemalloc.reset_peak()
        before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
        try:
            payload = unpack(data, max_bytes=FUZZ_LIMIT)
        except WireError as error:
            places.add([line for _, line in traceback.walk_tb(error.__traceback__)][-1])
        else:
            num_read += 1
            assert packed_size(payload) == struct.unpack_from("<Q", data, 8)[0] <= FUZZ_LIMIT
            assert data[5] or pack(payload) == data
        slowest = max(slowest, time.perf_counter() - start)
        assert tracemalloc.get_traced_memory()[1] - before < FUZZ_LIMIT + 256 * 1024
    tracemalloc.stop()
    assert slowest < 2
    assert num_read > num / 100
    assert len(places) >= 12, "the mutations do not reach most of the checks"


def test_the_dump_in_the_docs_is_what_its_command_prints() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    found = re.search(r"<<'EOF'\n(.*?)EOF\n```.*?```text\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)
    assert found
    program, printed, annotated = found.groups()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "wire.md", "exec"), {"__name__": "__main__"})
    assert output.getvalue() == printed
    hexes = re.compile(r"^[0-9a-f]{2}  ((?:[0-9a-f]{2} ?)+)", re.MULTILINE)
    assert bytes.fromhex("".join(hexes.findall(annotated))) == bytes.fromhex("".join(hexes.findall(printed)))
