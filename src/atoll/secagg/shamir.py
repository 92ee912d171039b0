"""Shamir's secret sharing of 32 bytes: any `threshold` shares determine the secret, fewer reveal nothing about it.

A secret s is the value at 0 of a random polynomial of degree threshold - 1 modulo P; the share of holder x is its value
at x = 1, 2, ... (Shamir 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

P = 2**256 + 297
"""The smallest prime above 2^256, so that every string of 32 bytes is a number below it."""
SHARE = 33
"""Number of bytes of a share."""

BLOCK = 16
"""Number of Horner steps between two reductions modulo P: holders are small numbers, so that values grow slowly."""


def split(secret: bytes, threshold: int, num_shares: int, random: Callable[[int], bytes]) -> list[bytes]:
    """Split a secret into shares for the holders 1, ..., num_shares."""
    size = 48  # random bytes for a coefficient: 128 bits more than P has, so that it is uniform modulo P
    raw = random(size * (threshold - 1))
    coefficients = [int.from_bytes(raw[at : at + size], "big") % P for at in range(0, len(raw), size)]
    blocks = [coefficients[at : at + BLOCK] for at in range(0, len(coefficients), BLOCK)]
    shares = []
    for x in range(1, num_shares + 1):
        value = 0
        for block in blocks:
            for coefficient in block:
                value = value * x + coefficient
            value %= P
        shares.append(((value * x + int.from_bytes(secret, "big")) % P).to_bytes(SHARE, "big"))
    return shares


def coefficients(holders: Sequence[int]) -> list[int]:
    """Return Lagrange's coefficients at 0, Π x_m / (x_m - x_j), which are the same for all secrets of these holders.

    >>> c = coefficients([1, 2])
    >>> (c[0] * 5 + c[1] * 7) % P
    3
    """
    product, denominators = 1, []
    for x in holders:
        product = product * x % P
        denominator = x
        for other in holders:
            if other != x:
                denominator = denominator * (other - x) % P
        denominators.append(denominator)
    return [product * inverse % P for inverse in _inverses(denominators)]


def combine(shares: Sequence[bytes], coefficients: Sequence[int]) -> bytes | None:
    """Return the secret of some shares, or None if they cannot be shares of 32 bytes."""
    total = sum(int.from_bytes(share, "big") * c for share, c in zip(shares, coefficients, strict=True)) % P
    return total.to_bytes(32, "big") if total < 1 << 256 else None


def _inverses(numbers: list[int]) -> list[int]:
    """Invert all numbers modulo P with one modular inversion (Montgomery's trick)."""
    prefixes, product = [], 1
    for number in numbers:
        prefixes.append(product)
        product = product * number % P
    inverse = pow(product, -1, P)
    inverses = []
    for number, prefix in zip(reversed(numbers), reversed(prefixes), strict=True):
        inverses.append(inverse * prefix % P)
        inverse = inverse * number % P
    return inverses[::-1]
