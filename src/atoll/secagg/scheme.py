"""Scheme: one way to have the sum of a cohort's vectors and nothing else, with all who take part played here.

Shapes: L values of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NamedTuple

import numpy as np

from atoll.secagg.encoding import Encoding
from atoll.secagg.wire import Invite, Mode

BATCH = 64


class Session(NamedTuple):
    """One sum: of whom, of what, and who is lost on the way."""

    run: str
    round: int
    attempt: int
    model: bytes
    """Hash of the model that all start from."""
    clients: tuple[int, ...]
    """Who is asked, ascending."""
    silent: Mapping[int, str]
    """The step from which on a client says nothing, for those who are lost."""
    length: int
    encoding: Encoding
    vector: Callable[[int], np.ndarray]
    """A client -> its integers (L,), unsigned as `encoding` has them."""
    min_survivors: int = 3
    """A sum of fewer clients is not opened."""


class Outcome(NamedTuple):
    """What came of a session, and the bytes of all its messages."""

    total_L: np.ndarray | None
    """The sum of the survivors' integers, modulo what the encoding says; None if there is none."""
    survivors: tuple[int, ...]
    bytes_up: int
    bytes_down: int
    why: str = ""
    """Why there is no sum."""


class Message(NamedTuple):
    """What a client is told."""

    client: int
    data: bytes


Player = Callable[[list[Message]], Iterable[bytes]]
"""Plays some clients: takes what they are told, and gives what they answer."""
Ask = Callable[[list[Message]], Iterator[bytes]]
"""Tells clients something, whoever plays them, and gives what they answer."""
Stage = Callable[[Callable[[], Player]], AbstractContextManager[Ask]]
"""Where clients are played: in this process, or in several, each of which makes a player and keeps to its clients."""


class Scheme(NamedTuple):
    """A way to add in secret."""

    play: Callable[[Session, Stage], Outcome]
    steps: tuple[str, ...]
    """What a client does, in this order; it can be lost before any of them."""
    counts_from: int
    """Clients that are lost before the step of this number, or at it, are not in the sum; later ones are."""
    check: Callable[[int], None]
    """Refuse a cohort of this size, with the way out."""
    moduli: tuple[int, ...] = (32, 64)
    """The bits of a value that it can add."""
    invite: Callable[[Session], Invite] | None = None
    """What the clients of a network are invited to; None where a scheme is for simulations only."""
    mode: Mode | None = None
    """What the server may do without seeing an update; None where a scheme is for simulations only."""


@contextmanager
def here(make: Callable[[], Player]) -> Iterator[Ask]:
    """Play all clients in this process, one after another."""
    play = make()

    def ask(messages: list[Message]) -> Iterator[bytes]:
        for message in messages:
            yield from play([message])

    yield ask


def batches(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Messages that are sent before their answers are heard: few, so that memory does not grow with the cohort."""
    rest = iter(messages)
    while found := list(islice(rest, BATCH)):
        yield found
