"""Secret randomness: keys, coins, and the exact discrete Gaussian. Shapes: N values.

Noise that is drawn as a float has gaps that reveal what it was added to (Mironov 2012, "On significance of the least
significant bits for differential privacy"). Here noise is an integer with exactly the probabilities of the definition
(its guarantee: Canonne, Kamath and Steinke 2020, arXiv:2004.00010):

- |x| is divided into bins of W = 2^m integers, W at most sigma / 32, or 1. A bin b is drawn with probability
  proportional to exp(-(bW)^2 / 2 sigma^2), a place j in it uniformly, and x = bW + j is kept with probability
  exp(-j (2bW + j) / 2 sigma^2); the product is exp(-x^2 / 2 sigma^2). A sign is drawn, and -0 is rejected. (Karney
  2016, arXiv:1303.6257, algorithm D, with narrower bins, so that nine of ten are kept without computing exp.)
- A uniform number is a string of random bits, drawn as far as comparisons need it. If the first bits do not decide,
  more are drawn, and the bound is computed with more digits. Floats only detect the undecided cases, with a band that
  is wider than their error, so that the outcome depends neither on rounding nor on the machine.
- Bits come from AES-256 in counter mode. The running time depends on the values drawn: an adversary must not be able to
  measure it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.core.errors import PlanError

Bounds = tuple[Fraction, Fraction]
"""Lower and upper bound on a real number."""

SMALLEST, LARGEST = 2.0**-6, 2.0**44
"""Range of the standard deviation, in steps of the grid."""
CELL_BITS = 14
"""Number of bits that index the table of bins; they determine the bin of most values."""
SPARE = 32
"""num / SPARE + SPARE extra values are drawn to replace rejected ones, which are about one in fifty."""
BLOCK = 1 << 15
"""Number of values that are drawn together, so that they stay in the processor's cache."""
ZEROS = memoryview(bytes(8 * BLOCK))
BAND = 2.0**-40
"""Distance from a probability below which a uniform number is not compared in float64; errors there are below 2^-48."""
GUARD = 12
"""Extra decimal digits: more than the rounding errors of a sum of thousands of terms can affect."""


def fresh_secret() -> bytes:
    """Return 32 random bytes from the operating system."""
    return os.urandom(32)


def derived(secret: bytes, *context: int | str) -> bytes:
    """Derive the 32-byte key of a secret and a context, by HKDF-SHA256 (RFC 5869).

    >>> derived(bytes(32), "noise", 1, 2) == derived(bytes(32), "noise", 12)
    False
    """
    info = [b"atoll privacy 1"]
    for item in context:
        text = str(item).encode()
        info.append((b"s" if isinstance(item, str) else b"i") + len(text).to_bytes(4, "big") + text)
    return HKDF(SHA256(), 32, None, b"".join(info)).derive(secret)


def coins(key: bytes, rate: Fraction, num: int) -> np.ndarray:
    """Draw `num` independent coins (N,), each true with probability exactly `rate`; use a key only once."""
    if not 0 <= rate <= 1:
        raise PlanError(f"a probability must be in [0, 1], got {rate}: check the batch size and the number of samples")
    if rate == 1:
        return np.ones(num, dtype=np.bool_)
    words, more = Bits(key, 0), Bits(key, 1)
    bound = int(rate * (1 << 32))
    drawn_N = words.uint32(num)
    result_N: np.ndarray = drawn_N < bound
    for position in np.flatnonzero(drawn_N == bound):
        result_N[position] = Uniform(bound, 32, more).below(lambda digits: (rate, rate))
    return result_N


def discrete_gaussian(key: bytes, sigma: float, num: int) -> np.ndarray:
    """Draw `num` independent integers (N,) with P(x) proportional to exp(-x^2 / 2 sigma^2); use a key only once.

    >>> discrete_gaussian(bytes(32), 3.0, 5).dtype
    dtype('int64')
    """
    return narrow_gaussian(key, sigma, num).astype(np.int64, copy=False)


def narrow_gaussian(key: bytes, sigma: float, num: int) -> np.ndarray:
    """Draw the values of `discrete_gaussian`, in int32 where sigma is below 2^24 and every value below 2^28."""
    if not SMALLEST <= sigma <= LARGEST:
        raise PlanError(
            f"the standard deviation of the noise must be in [2^-6, 2^44] steps of the grid, got {sigma}: change sigma "
            "or the grid"
        )
    table = _table(float(sigma))
    streams = Streams(Bits(key, 0), Bits(key, 1), Bits(key, 2))
    return _draw(table, streams, num)


class Bits:
    """A stream of random bits: AES-256 in counter mode, with 2^32 disjoint streams for each key."""

    def __init__(self, key: bytes, number: int) -> None:
        self._stream = Cipher(AES256(key), CTR(number.to_bytes(4, "big") + bytes(12))).encryptor()

    def uint64(self, num: int) -> np.ndarray:
        """Draw `num` words of 64 bits."""
        return self.fill(np.empty(num, np.dtype("<u8")))

    def uint32(self, num: int) -> np.ndarray:
        """Draw `num` words of 32 bits."""
        return self.fill(np.empty(num, np.dtype("<u4")))

    def fill(self, words: np.ndarray) -> np.ndarray:
        """Overwrite an array with random bits, and return it."""
        if len(words):
            zeros = ZEROS[: words.nbytes] if words.nbytes <= len(ZEROS) else bytes(words.nbytes)
            self._stream.update_into(zeros, words.data.cast("B"))
        return words


class Uniform:
    """A uniform number in [0, 1), of which only as many binary digits are drawn as comparisons need."""

    def __init__(self, drawn: int, num_bits: int, more: Bits) -> None:
        self.drawn, self.num_bits, self.more = drawn, num_bits, more

    def below(self, bounds: Callable[[int], Bounds]) -> bool:
        """Return whether the number is below another, which `bounds` computes to any number of decimal digits."""
        digits = 40
        while True:
            low, high = bounds(digits)
            if Fraction(self.drawn + 1, 1 << self.num_bits) <= low:
                return True
            if Fraction(self.drawn, 1 << self.num_bits) >= high:
                return False
            self.drawn = self.drawn << 64 | int(self.more.uint64(1)[0])
            self.num_bits += 64
            digits += 20


class Streams(NamedTuple):
    """Three disjoint streams of one key."""

    words: Bits
    """One word for each value: its sign, its cell, and its place in the bin."""
    fine: Bits
    """32 bits for each value, which decide whether it is kept."""
    more: Bits
    """Further bits for the few values that are still undecided."""


class Table(NamedTuple):
    """Numbers that depend on sigma only, computed once."""

    log_width: int
    """m: a bin has 2^m integers."""
    twice_variance: Fraction
    """2 sigma^2, exactly."""
    bins: np.ndarray
    """Cell -> its bin; -1 if a bin ends within the cell."""
    lowest: np.ndarray
    """Sign and cell -> the lowest integer of its bin, or of the bin's mirror image if the sign is minus.

    Its type is that of the values: int32 where sign, cell and place fit into 32 bits, else int64."""
    sure: np.ndarray
    """Sign and cell -> the 32-bit number below which every place of its bin is kept."""
    ends: np.ndarray
    """Bin -> the floor of 2^64 times the probability of this bin or an earlier one; the last is 2^64 - 1."""


def _draw(table: Table, streams: Streams, num: int) -> np.ndarray:
    """Draw `num` values: propose some more, which replace the rejected ones."""
    total = num + num // SPARE + SPARE
    values = np.empty(total, dtype=table.lowest.dtype)
    starts = range(0, total, BLOCK)
    proposals = [_propose(table, streams, values[start : start + BLOCK]) for start in starts]
    undecided = np.concatenate([start + proposal[0] for start, proposal in zip(starts, proposals, strict=True)])
    signed_cells = np.concatenate([proposal[1] for proposal in proposals])
    fine = np.concatenate([proposal[2] for proposal in proposals])
    values[undecided], keep = _decide(table, signed_cells, values[undecided], fine, streams.more)
    rejected = undecided[~keep]
    holes = rejected[: np.searchsorted(rejected, num)]
    spares = np.delete(values[num:], rejected[len(holes) :] - num)
    if len(spares) < len(holes):
        spares = np.concatenate([spares, _draw(table, streams, len(holes) - len(spares))])
    values[holes] = spares[: len(holes)]
    return values[:num]


def _propose(table: Table, streams: Streams, out_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill an array with proposed values; return the undecided indices, with their signed cells and fine bits.

    A word is a sign, a cell, and a place: from the near end of the bin if the sign is plus, from the far end if minus.
    """
    kind = np.dtype(f"<u{out_N.itemsize}")
    words, fine = streams.words.fill(out_N.view(kind)), streams.fine.uint32(len(out_N))
    signed_cells = np.empty(len(out_N), dtype=np.intp)
    np.right_shift(words, kind.type(8 * out_N.itemsize - 1 - CELL_BITS), out=signed_cells, casting="unsafe")
    words &= kind.type((1 << table.log_width) - 1)
    out_N += table.lowest.take(signed_cells, mode="clip")
    undecided = np.flatnonzero(fine >= table.sure.take(signed_cells, mode="clip"))
    return undecided, signed_cells[undecided], fine[undecided]


def _decide(
    table: Table, signed_cells: np.ndarray, values: np.ndarray, fine: np.ndarray, more: Bits
) -> tuple[np.ndarray, np.ndarray]:
    """Draw more bits for undecided values; return the values, and whether each is kept."""
    cells = signed_cells & ((1 << CELL_BITS) - 1)
    negative = signed_cells >> CELL_BITS == 1
    mask = (1 << table.log_width) - 1
    drawn = values.astype(np.int64) - table.lowest[signed_cells]
    places = np.where(negative, mask - drawn, drawn)
    bins = table.bins[cells]
    unclear = np.flatnonzero(bins < 0)
    bins[unclear] = _bins(table, cells[unclear].astype(np.uint64), more)
    firsts = bins << table.log_width
    sizes = firsts + places
    keep = _kept(table, firsts, places, fine, more) & ~(negative & (sizes == 0))
    return np.where(negative, -sizes, sizes), keep


def _bins(table: Table, cells: np.ndarray, more: Bits) -> np.ndarray:
    """Return the bins of uniform numbers whose first bits are `cells`, for cells in which a bin ends."""
    rest = 64 - CELL_BITS
    drawn = cells << rest | more.uint64(len(cells)) >> CELL_BITS
    bins = np.searchsorted(table.ends, drawn, side="left")
    for position in np.flatnonzero(table.ends[bins] == drawn):
        bins[position] = _bin_of(table, Uniform(int(drawn[position]), 64, more), int(bins[position]))
    return bins


def _bin_of(table: Table, number: Uniform, b: int) -> int:
    """Return the bin of a uniform number, which is b or a later one."""
    while not number.below(partial(_share, table, b)):
        b += 1
    return b


def _kept(table: Table, first: np.ndarray, places: np.ndarray, fine: np.ndarray, more: Bits) -> np.ndarray:
    """Return whether uniform numbers that start with the bits of `fine` are below exp(-j (2bW + j) / 2 sigma^2)."""
    drawn = fine.astype(np.uint64) << 32 | more.uint32(len(fine))
    exponents = places.astype(np.float64) * (2 * first + places) / float(table.twice_variance)
    gap = np.exp(-exponents) - drawn * 2.0**-64
    result: np.ndarray = gap > 0
    for position in np.flatnonzero(np.abs(gap) <= BAND):
        start, place = int(first[position]), int(places[position])
        bounds = partial(_exp_bounds, place * (2 * start + place) / table.twice_variance)
        result[position] = Uniform(int(drawn[position]), 64, more).below(bounds)
    return result


@lru_cache(maxsize=64)
def _table(sigma: float) -> Table:
    """Compute the table of a sigma, in a few milliseconds."""
    log_width = max(0, math.floor(math.log2(sigma)) - 5)
    empty = np.empty(0)
    table = Table(
        log_width=log_width,
        twice_variance=2 * Fraction(sigma) ** 2,
        bins=empty,
        lowest=empty,
        sure=empty,
        ends=empty,
    )
    ends: list[int] = []
    while not ends or ends[-1] < (1 << 64) - 1:
        low, high = (math.floor(bound * (1 << 64)) for bound in _share(table, len(ends), 60))
        assert low == high or low >= (1 << 64) - 1, "60 digits are not enough for 64 bits"
        ends.append(min(low, (1 << 64) - 1))
    ends_B = np.array(ends, dtype=np.uint64)
    starts = np.arange(1 << CELL_BITS, dtype=np.uint64) << (64 - CELL_BITS)
    finals = starts | ((1 << (64 - CELL_BITS)) - 1)
    bins, lasts = (np.searchsorted(ends_B, words, side="left") for words in (starts, finals))
    clear = (bins == lasts) & (ends_B[bins] != starts) & (ends_B[bins] != finals)
    width = 1 << log_width
    furthest = (width - 1) * (2 * bins.astype(np.float64) * width + width - 1) / float(table.twice_variance)
    sure = np.floor((np.exp(-furthest) - BAND) * 2.0**32).clip(0)
    sure[~clear] = 0
    sure_minus = np.where(bins == 0, 0, sure)  # bin 0 holds -0, which must be rejected
    return table._replace(
        bins=np.where(clear, bins, -1),
        lowest=np.concatenate([bins * width, 1 - (bins + 1) * width]).astype(
            np.int32 if 1 + CELL_BITS + log_width <= 32 else np.int64
        ),
        sure=np.concatenate([sure, sure_minus]).astype(np.uint32),
        ends=ends_B,
    )


def _share(table: Table, b: int, digits: int) -> Bounds:
    """Bound the probability of bin b or an earlier one, to `digits` decimal digits."""
    sums = _sums(Fraction(1 << 2 * table.log_width) / table.twice_variance, digits)
    error = Fraction(1, 10**digits)
    part, whole = Fraction(sums[min(b, len(sums) - 1)]), Fraction(sums[-1])
    return (part - error) / (whole + error), (part + error) / (whole - error)


@lru_cache(maxsize=8)
def _sums(slope: Fraction, digits: int) -> list[Decimal]:
    """Return partial sums of exp(-slope b^2) over b = 0, 1, ..., until the rest of the series is below 10^-digits."""
    context = Context(prec=digits + GUARD)
    rate = context.divide(Decimal(slope.numerator), Decimal(slope.denominator))
    total = Decimal(0)
    sums: list[Decimal] = []
    while True:
        b = len(sums)
        term = context.exp(context.multiply(rate, Decimal(-b * b)))
        total = context.add(total, term)
        sums.append(total)
        # Bins are at least sigma / 64 wide, so that the rest of the series is below 65 times this term.
        if term < Decimal(1).scaleb(-digits - GUARD // 2):
            return sums


def _exp_bounds(exponent: Fraction, digits: int) -> Bounds:
    """Bound exp(-exponent) to `digits` decimal digits, for exponents >= 0. Decimal's exp is rounded correctly."""
    if exponent == 0:
        return Fraction(1), Fraction(1)
    context = Context(prec=digits + GUARD)
    value = context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator)))
    error = Fraction(1, 10**digits)
    return Fraction(value) - error, Fraction(value) + error
