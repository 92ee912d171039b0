"""Shamir's secret sharing of 32 bytes: any `threshold` of the shares give the secret, fewer say nothing of it.

A secret s is the value at 0 of a random polynomial of degree threshold - 1 modulo P; the share of holder x is its value
at x = 1, 2, ... (Shamir 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

P = 2**256 + 297
"""The smallest prime above 2^256: every string of 32 bytes is a number below it."""
SHARE = 33
"""Bytes of a share."""

RUN = 16
"""Steps of a polynomial between two divisions by P: holders are small numbers, so that values grow slowly."""


def split(secret: bytes, threshold: int, num_shares: int, random: Callable[[int], bytes]) -> list[bytes]:
    """Cut a secret into shares for the holders 1, ..., num_shares."""
    spare = 48  # bytes a coefficient: 128 bits more than P, so that none is likelier than another
    raw = random(spare * (threshold - 1))
    coefficients = [int.from_bytes(raw[at : at + spare], "big") % P for at in range(0, len(raw), spare)]
    runs = [coefficients[at : at + RUN] for at in range(0, len(coefficients), RUN)]
    shares = []
    for x in range(1, num_shares + 1):
        value = 0
        for run in runs:
            for coefficient in run:
                value = value * x + coefficient
            value %= P
        shares.append(((value * x + int.from_bytes(secret, "big")) % P).to_bytes(SHARE, "big"))
    return shares


def coefficients(holders: Sequence[int]) -> list[int]:
    """Lagrange's coefficients at 0, Π x_m / (x_m - x_j): the same for every secret with these holders.

    >>> c = coefficients([1, 2])
    >>> (c[0] * 5 + c[1] * 7) % P
    3
    """
    product, below = 1, []
    for x in holders:
        product = product * x % P
        under = x
        for other in holders:
            if other != x:
                under = under * (other - x) % P
        below.append(under)
    return [product * inverse % P for inverse in _inverses(below)]


def combine(shares: Sequence[bytes], coefficients: Sequence[int]) -> bytes | None:
    """The secret behind some shares, or None if they cannot be shares of 32 bytes."""
    total = sum(int.from_bytes(share, "big") * c for share, c in zip(shares, coefficients, strict=True)) % P
    return total.to_bytes(32, "big") if total < 1 << 256 else None


def _inverses(numbers: list[int]) -> list[int]:
    """Invert all at the price of one (Montgomery's trick)."""
    before, product = [], 1
    for number in numbers:
        before.append(product)
        product = product * number % P
    inverse = pow(product, -1, P)
    inverses = []
    for number, earlier in zip(reversed(numbers), reversed(before), strict=True):
        inverses.append(inverse * earlier % P)
        inverse = inverse * number % P
    return inverses[::-1]
