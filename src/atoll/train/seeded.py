"""Draws of modules that know the generators of torch, NumPy and Python only, such as first weights."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from atoll.train.devices import seeded_device

_lock = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Let the generators that a process has one of begin at `seed`, and be afterwards as if nobody had drawn.

    So does the generator of a `device` that is not the processor.

    One thread at a time: a server that begins two runs at once gives each the first weights that it has alone.
    """
    with _lock:
        torchs, pythons, numpys = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            with contextlib.nullcontext() if device is None or device.type == "cpu" else seeded_device(device, seed):
                yield
        finally:
            torch.default_generator.set_state(torchs)
            random.setstate(pythons)
            np.random.set_state(numpys)
