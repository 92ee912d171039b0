"""Draws of modules that know torch's own generator only, such as first weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's own generator begin at `seed`, and be afterwards as if nobody had drawn.

    A process has one such generator, so one thread at a time: a server that begins two runs at once gives each the
    first weights that it has alone.
    """
    with _lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
