"""Encoding of real values as integers that can be added under a mask, and its inverse.

Values are clipped to [-clip, clip], scaled to whole levels and rounded up or down at random, so that the mean is kept.
Integers are modulo 2^32 or 2^64. A weighted mean is sent as weighted values, with the weight as the last value.

Shapes: D values, L = D + 1 with the weight.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from atoll.core.errors import PlanError
from atoll.secagg.masks import Stream


class Encoding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Parameters of the encoding of a value as an integer."""

    clip: Annotated[float, msgspec.Meta(gt=0, lt=1e300)]
    """Maximum absolute value; larger values are cut to it."""
    value_bits: Annotated[int, msgspec.Meta(ge=2, le=53)]
    """Bits of one value, including its sign."""
    modulus_bits: Literal[32, 64] = 32
    """Bits of one masked value: sums are modulo 2^modulus_bits."""

    @property
    def levels(self) -> int:
        """The integer that encodes `clip`."""
        return (1 << self.value_bits - 1) - 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """NumPy type of encoded values."""
        return np.dtype(f"<u{self.modulus_bits // 8}")


def finest(clip: float, num_clients: int, modulus_bits: Literal[32, 64] = 32) -> Encoding:
    """Return the encoding with the most bits whose sum over `num_clients` clients cannot overflow.

    >>> finest(1.0, 500).value_bits
    23
    """
    bits = modulus_bits - max(num_clients - 1, 0).bit_length()
    if bits < 2:
        raise PlanError(
            f"the sum of {num_clients} clients leaves {bits} bits for a value modulo 2^{modulus_bits}: "
            "use modulus_bits = 64 or a smaller cohort"
        )
    encoding = Encoding(clip, min(bits, 53), modulus_bits)
    check_sum(encoding, num_clients)
    return encoding


def check_sum(encoding: Encoding, num_clients: int) -> None:
    """Refuse an encoding whose sum could wrap around: num_clients·(2^(bits-1) - 1) must be below 2^(m-1)."""
    if num_clients * encoding.levels >= 1 << encoding.modulus_bits - 1:
        raise PlanError(
            f"{num_clients} clients with values of {encoding.value_bits} bits can overflow a sum modulo "
            f"2^{encoding.modulus_bits}: use fewer value_bits, modulus_bits = 64 or a smaller cohort"
        )


def encode(values_D: np.ndarray, weight: float, encoding: Encoding, rounding: Stream) -> np.ndarray:
    """Turn values and their weight, a share in [0, 1] of the largest weight, into integers (L,).

    Each value v becomes floor(weight · v · levels / clip + u) with u uniform in [0, 1), and the weight likewise.
    """
    if not 0 <= weight <= 1:
        raise PlanError(
            f"a weight must be a share of the largest one, in [0, 1], got {weight}; divide by the largest weight"
        )
    scaled_L = np.empty(values_D.size + 1, np.float64)
    np.clip(values_D, -encoding.clip, encoding.clip, out=scaled_L[:-1])  # removes infinities, but keeps NaN
    if not np.isfinite(scaled_L[:-1]).all():
        raise PlanError("values under secure aggregation must be finite: refuse this update before it is masked")
    scaled_L[:-1] *= weight * (encoding.levels / encoding.clip)
    scaled_L[-1] = weight * encoding.levels
    np.clip(scaled_L, -encoding.levels, encoding.levels, out=scaled_L)  # scaling may have rounded up beyond the levels
    scaled_L += rounding.uniform(scaled_L.size)
    np.floor(scaled_L, out=scaled_L)
    return scaled_L.astype(np.int64).astype(encoding.dtype)


def decode(sum_L: np.ndarray, encoding: Encoding) -> tuple[np.ndarray, float]:
    """Return the weighted mean of the values (D,), and the sum of the weights; zeros if the weights sum to 0."""
    signed_L = sum_L.astype(encoding.dtype).view(f"<i{encoding.modulus_bits // 8}").astype(np.float64)
    total = float(signed_L[-1])
    if total <= 0:
        return np.zeros(sum_L.size - 1), 0.0
    return signed_L[:-1] * (encoding.clip / total), total / encoding.levels
