"""Scheme: a method of secure aggregation, with all its participants simulated on this machine.

Shapes: L values of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NamedTuple

import numpy as np

from atoll.core.errors import AtollError, PlanError
from atoll.secagg.encoding import Encoding
from atoll.secagg.wire import Invite, Mode

BATCH = 64
"""Number of messages that are sent before their answers are read."""


def _elsewhere(client: int) -> np.ndarray:
    raise AtollError(f"the vector of client {client} is not here; this is a bug")


class Session(NamedTuple):
    """One secure sum: its clients, their vectors, and the clients that drop out."""

    run: str
    round: int
    attempt: int
    model: bytes
    """Hash of the model that all clients start from."""
    clients: tuple[int, ...]
    """The cohort, ascending."""
    silent: Mapping[int, str]
    """Client that drops out -> the first step in which it does not answer."""
    length: int
    """Number of values of a vector."""
    encoding: Encoding
    vector: Callable[[int], np.ndarray] = _elsewhere
    """Client -> its integers (L,), in the unsigned type of `encoding`; over a network clients keep their own."""
    min_survivors: int = 3
    """Minimum number of clients in a sum that is opened."""


class Outcome(NamedTuple):
    """Result of a session, and the bytes of all its messages."""

    total_L: np.ndarray | None
    """The sum of the survivors' integers, modulo 2^modulus_bits; None if there is none."""
    survivors: tuple[int, ...]
    """Clients whose vectors are in the sum, ascending."""
    bytes_up: int
    bytes_down: int
    why: str = ""
    """Why there is no sum; "" if there is one."""


class Message(NamedTuple):
    """A message to a client."""

    client: int
    data: bytes


Responder = Callable[[list[Message]], Iterable[bytes]]
"""Messages to some simulated clients -> their answers."""
Ask = Callable[[list[Message]], Iterator[bytes]]
"""Messages to any clients -> their answers; each message is delivered to the process that simulates its client."""
ClientHost = Callable[[Callable[[], Responder]], AbstractContextManager[Ask]]
"""Where clients are simulated: in this process, or in several, each with a responder of its own for its clients."""


class Scheme(NamedTuple):
    """A method of secure aggregation."""

    simulate: Callable[[Session, ClientHost], Outcome]
    """Run a whole session with simulated clients."""
    steps: tuple[str, ...]
    """Names of the client's steps, in order; a client can drop out before any of them."""
    counts_from: int
    """Index of the step that adds a client's vector to the sum: a client that drops out at or before it is not in."""
    check: Callable[[int], None]
    """Refuse a cohort of this size, with the way out."""
    moduli: tuple[int, ...] = (32, 64)
    """Supported numbers of bits of a value."""
    invite: Callable[[Session], Invite] | None = None
    """Session -> the invitation for clients of a network; None for a scheme that exists in simulations only."""
    mode: Mode | None = None
    """Server behaviour that is withstood; None for a scheme that exists in simulations only."""


@contextmanager
def in_this_process(make: Callable[[], Responder]) -> Iterator[Ask]:
    """Simulate all clients in this process, one after another."""
    respond = make()

    def ask(messages: list[Message]) -> Iterator[bytes]:
        for message in messages:
            yield from respond([message])

    yield ask


def batches(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Divide messages into batches of BATCH, so that memory does not grow with the cohort."""
    rest = iter(messages)
    while batch := list(islice(rest, BATCH)):
        yield batch


def check_several(num_clients: int) -> None:
    """Refuse a cohort of fewer than two clients, whose sum would reveal an update."""
    if num_clients < 2:
        raise PlanError(f"a sum of {num_clients} clients hides nothing: ask at least 2")


def no_sum(session: Session, survivors: Sequence[int], bytes_up: int) -> Outcome:
    """Return the outcome of a session with fewer survivors than its minimum."""
    return Outcome(
        total_L=None,
        survivors=(),
        bytes_up=bytes_up,
        bytes_down=0,
        why=f"{len(survivors)} clients are left, at least {session.min_survivors} are needed; ask more",
    )
