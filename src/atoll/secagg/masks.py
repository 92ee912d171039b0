"""Masks: seeds expanded by AES-256 in counter mode, and added to vectors of unsigned integers that wrap around."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

BLOCK = 1 << 18
"""Number of bytes that are expanded and added at once, so that they stay in the processor's cache."""
ZEROS = bytes(BLOCK)


class Mask(NamedTuple):
    """The seed of a mask, and its sign."""

    seed: bytes
    """An AES-256 key that is used for this mask only."""
    plus: bool
    """Whether the mask is added; else it is subtracted."""


def apply(vector: np.ndarray, masks: Iterable[Mask]) -> None:
    """Add masks to a vector of uint32 or uint64 in place."""
    block = np.empty(BLOCK // vector.itemsize, vector.dtype)
    raw = block.data.cast("B")
    for seed, plus in masks:
        stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
        fold = np.add if plus else np.subtract
        for start in range(0, vector.size, block.size):
            part = vector[start : start + block.size]
            stream.update_into(memoryview(ZEROS)[: part.nbytes], raw)
            fold(part, block[: part.size], out=part)


def expand(seed: bytes, out: np.ndarray) -> None:
    """Overwrite an array with the mask of a seed."""
    stream, raw = Cipher(AES256(seed), CTR(bytes(16))).encryptor(), out.data.cast("B")
    for start in range(0, raw.nbytes, BLOCK):
        part = raw[start : start + BLOCK]
        stream.update_into(memoryview(ZEROS)[: part.nbytes], part)


class Stream:
    """Uniform numbers from AES-256 in counter mode, for rounding; each call continues the stream."""

    def __init__(self, key: bytes | None = None) -> None:
        """Start from a key of 32 bytes, or from the operating system's randomness."""
        self._stream = Cipher(AES256(os.urandom(32) if key is None else key), CTR(bytes(16))).encryptor()

    def uniform(self, num: int) -> np.ndarray:
        """Return `num` float64 in [0, 1), in steps of 2^-32."""
        words = np.empty(num, np.uint32)
        self._stream.update_into(bytes(words.nbytes), words.data.cast("B"))
        return words * 2.0**-32
