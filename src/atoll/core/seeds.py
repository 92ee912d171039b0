"""Seeds derived from (seed, purpose, round, client), never from a global generator or the order of execution."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def derive(seed: int, purpose: str, *path: int) -> int:
    """Return the 63-bit seed of one purpose and path, such as round and client.

    >>> derive(0, "cohort", 3) == derive(0, "cohort", 3)
    True
    >>> derive(0, "cohort", 3) == derive(0, "cohort", 4)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose; equal arguments give equal draws on every machine."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive(seed, purpose, *path)))
