"""A NumPy generator with secret bits, from which samplers draw a private cohort."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from atoll.privacy.noise import Bits

AHEAD = 256
"""Number of 64-bit words that are drawn at once."""


UINT64 = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
UINT32 = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)
DOUBLE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)


class _Table(ctypes.Structure):
    """NumPy's table of functions of a bit generator, `bitgen_t`."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", UINT64),
        ("next_uint32", UINT32),
        ("next_double", DOUBLE),
        ("next_raw", UINT64),
    )


class SecretBits:
    """A NumPy bit generator on AES-256 in counter mode; use a key only once.

    >>> rngs = [np.random.Generator(SecretBits(bytes(32))) for _ in range(2)]
    >>> len({tuple(rng.choice(1000, size=5, replace=False).tolist()) for rng in rngs})
    1
    """

    def __init__(self, key: bytes) -> None:
        bits, words = Bits(key, 0), list[int]()

        def word(_: object) -> int:
            if not words:
                words.extend(bits.uint64(AHEAD).tolist())
            return words.pop()

        self._table = _Table(
            None,
            UINT64(word),
            UINT32(lambda _: word(_) >> 32),
            DOUBLE(lambda _: (word(_) >> 11) * 2.0**-53),
            UINT64(word),
        )
        wrap = ctypes.pythonapi.PyCapsule_New
        wrap.restype, wrap.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = wrap(ctypes.addressof(self._table), b"BitGenerator", None)
        self.lock = threading.Lock()


def secret_generator(key: bytes) -> np.random.Generator:
    """Return a generator whose draws cannot be predicted without the key."""
    return np.random.Generator(SecretBits(key))  # type: ignore[arg-type]
