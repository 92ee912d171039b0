"""Exact sums of large numbers under a mask: fixed point, divided into limbs of few bits.

A masked value is cut at the plan's clip and rounded to its levels, which suits parameters. Numbers such as a count of
steps or a running variance must neither be cut nor rounded, so each takes several integers. Limbs are shorter than a
masked value by two bits, so that a sum over as many clients as the encoding allows cannot wrap around.

Shapes: E numbers, K limbs of each.
"""

from __future__ import annotations

import numpy as np

from atoll.secagg.encoding import Encoding

FRACTION_BITS, WHOLE_BITS = 48, 48
"""Numbers are rounded to multiples of 2^-48, and cut to [-2^48, 2^48]."""


def limb_bits(encoding: Encoding) -> int:
    """Return the number of bits of one limb."""
    return max(1, encoding.value_bits - 2)


def num_limbs(encoding: Encoding) -> int:
    """Return the number of limbs of one number."""
    return -(-(FRACTION_BITS + WHOLE_BITS + 1) // limb_bits(encoding))


def to_limbs(values_E: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Divide finite numbers into limbs, in the encoding's integer type (E K,).

    >>> encoding = Encoding(1.0, 23)
    >>> from_limbs(to_limbs(np.array([1e6, -0.25]), encoding) + to_limbs(np.array([2.0, 0.5]), encoding), encoding)
    array([1.000002e+06, 2.500000e-01])
    """
    bits, count, most = limb_bits(encoding), num_limbs(encoding), 2.0**WHOLE_BITS
    scaled = np.rint(np.clip(values_E, -most, most) * 2.0**FRACTION_BITS)
    limbs = [
        number >> bits * place & (1 << bits) - 1 if place < count - 1 else number >> bits * place
        for number in map(int, scaled.tolist())
        for place in range(count)
    ]
    return np.array(limbs, dtype=np.int64).astype(encoding.dtype)


def from_limbs(total: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Return the sums of numbers from the sums of their limbs (E,)."""
    bits, count = limb_bits(encoding), num_limbs(encoding)
    signed = total.astype(encoding.dtype).view(f"<i{encoding.modulus_bits // 8}").tolist()
    sums = [
        sum(limb << bits * place for place, limb in enumerate(signed[start : start + count]))
        for start in range(0, len(signed), count)
    ]
    return np.array([scaled / 2**FRACTION_BITS for scaled in sums])
