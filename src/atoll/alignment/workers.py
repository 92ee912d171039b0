"""Processes that share the work of an alignment, which is all in the points of a curve."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from atoll.alignment.curve import Spread, in_order


@contextmanager
def spread_over(workers: int) -> Iterator[Spread]:
    """Give work on parts to so many processes; to none if that is one."""
    if workers == 1:
        yield in_order
        return
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=_as_a_worker) as pool:
        yield lambda function, parts: list(pool.map(function, parts)) if len(parts) > 1 else in_order(function, parts)


def _as_a_worker() -> None:
    """Leave Ctrl-C to the process that waits for the workers and then ends them; end without a word at SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
