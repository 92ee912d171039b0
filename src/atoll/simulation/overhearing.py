"""What a server hears of a secure sum before it is opened: masked vectors. Shapes: L values of a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.scheme import Ask, ClientHost, Message, Outcome, Responder, Scheme, Session
from atoll.secagg.schemes.additive import NUMBER
from atoll.simulation.driver import Simulation

KEPT = 4096
"""Values of a masked vector that are kept: enough to tell masks from none."""


def overhear(simulation: Simulation) -> dict[int, np.ndarray]:
    """Let the server of a simulation write down masked vectors; return where, by client."""
    masked: dict[int, np.ndarray] = {}
    if simulation.job.secure is not None:
        scheme = overheard(simulation.job.secure.scheme, masked)
        simulation.job = replace(simulation.job, secure=simulation.job.secure._replace(scheme=scheme))
    return masked


def overheard(scheme: Scheme, masked: dict[int, np.ndarray]) -> Scheme:
    """Return the scheme with a server that writes into `masked` what each client sends under its masks."""

    def simulate(session: Session, host: ClientHost) -> Outcome:
        @contextmanager
        def listening(make: Callable[[], Responder]) -> Iterator[Ask]:
            with host(make) as ask:

                def heard(messages: list[Message]) -> Iterator[bytes]:
                    for answer in ask(messages):
                        _note(answer, session, masked)
                        yield answer

                yield heard

        return scheme.simulate(session, listening)

    return scheme._replace(simulate=simulate)


def _note(answer: bytes, session: Session, masked: dict[int, np.ndarray]) -> None:
    """Keep the vector of an answer that holds one: of pairwise masks, or a share among several servers."""
    dtype, num_bytes = session.encoding.dtype, session.length * np.dtype(session.encoding.dtype).itemsize
    if len(answer) < num_bytes:
        return
    if len(answer) == NUMBER + num_bytes:
        masked[int.from_bytes(answer[:NUMBER], "little")] = np.frombuffer(answer[NUMBER:], dtype)[:KEPT].copy()
        return
    try:
        envelope = wire.read_envelope(answer, len(answer))
        vector = wire.read_body(envelope, wire.Masked).vector
    except Abort:
        return  # another message, or a scheme that encrypts in place of masks
    masked[envelope.sender] = np.frombuffer(vector, dtype)[:KEPT].copy()
