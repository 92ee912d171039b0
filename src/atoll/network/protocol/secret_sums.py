"""Evaluations that sites add in secret: the session that follows from a version, and the vector that a site adds.

The vector is a 1, by which the sites are counted, and the condensed sums of a site by name, all as limbs of fixed
point (`secagg/limbs.py`). Counts arrive exactly, other sums rounded to multiples of 2^-48. Values beyond 2^48 are
refused, since they would be cut.

Shapes: E numbers, L = E K integers of their limbs.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import numpy as np
import torch

from atoll.core.errors import PlanError
from atoll.core.messages import Payload, State, Task
from atoll.core.wire import pack
from atoll.secagg.encoding import Encoding, finest
from atoll.secagg.limbs import WHOLE_BITS, from_limbs, num_limbs, to_limbs
from atoll.secagg.scheme import Session
from atoll.secagg.schemes.pairwise import pairwise
from atoll.secagg.wire import ENVELOPE_BYTES, Invite

FIRST_TASK = 10**12
"""The session of version v has the task of this number plus v, which no attempt to train reaches."""
MIN_SITES = 3
"""Minimum number of sites that a session begins with: of a sum of two, each knows the other's part."""
MODULUS_BITS: Literal[64] = 64
BOUND = 2.0**WHOLE_BITS
"""Maximum absolute value of one sum of a site."""
SCHEME = pairwise(server="active")
"""How evaluations are added in every run, whatever its plan says of updates."""


def task_of(client: int, version: int) -> Task:
    """Return the task under which a client's messages about a version travel."""
    return Task(client, version, FIRST_TASK + version)


def session_of(run: str, version: int, model: str, layout: State, clients: tuple[int, ...]) -> Session:
    """Return the session in which clients add sums of this layout, of the version whose broadcast is `model`."""
    encoding = finest(1.0, len(clients), MODULUS_BITS)
    names = json.dumps([(name, list(layout[name].shape)) for name in sorted(layout)], separators=(",", ":"))
    return Session(
        run=run,
        round=version,
        attempt=FIRST_TASK + version,
        model=hashlib.sha256(f"atoll evaluation 1\0{model}\0{names}".encode()).digest(),
        clients=clients,
        silent={},
        length=(1 + sum(value.numel() for value in layout.values())) * num_limbs(encoding),
        encoding=encoding,
        min_survivors=2,  # each client asks for as many as its own floors say
    )


def invite_of(session: Session) -> Invite:
    """Return the only invitation to a session that clients take."""
    assert SCHEME.invite is not None
    return SCHEME.invite(session)


def max_answer_bytes(session: Session) -> int:
    """Return the maximum bytes of an answer in a session: a masked vector, or shares for everybody."""
    return invite_of(session).config.num_bytes + ENVELOPE_BYTES * (len(session.clients) + 1)


def pack_sums(sums: State) -> bytes:
    """Return sums as bytes; most bins of histograms are empty, so that they become short."""
    return pack(Payload(torch.zeros(0), (sums,)), compress=True)


def check_addable(sums: State) -> None:
    """Refuse sums that are not finite or beyond the bound: they would be cut."""
    for name, value in sums.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        if not largest <= BOUND:
            raise PlanError(
                f"{name} of this evaluation is {largest:g}: sums up to 2^{WHOLE_BITS} can be added in secret; measure "
                "fewer samples, or leave out the metric that has such sums"
            )


def to_vector(sums: State, encoding: Encoding) -> np.ndarray:
    """Return the integers that a site adds (L,).

    >>> encoding = finest(1.0, 3, MODULUS_BITS)
    >>> one = to_vector({"count": torch.tensor(2.0)}, encoding)
    >>> from_total(one + one, 2, {"count": torch.tensor(0.0)}, encoding)
    {'count': tensor(4., dtype=torch.float64)}
    """
    check_addable(sums)
    values_E = [sums[name].double().numpy().reshape(-1) for name in sorted(sums)]
    return to_limbs(np.concatenate([[1.0], *values_E]), encoding)


def from_total(total_L: np.ndarray, num_sites: int, layout: State, encoding: Encoding) -> State | None:
    """Return the sums of so many sites together; None if the total does not count these sites."""
    count, *values = from_limbs(total_L, encoding).tolist()
    if count != num_sites:
        return None
    names = sorted(layout)
    parts = torch.split(torch.tensor(values, dtype=torch.float64), [layout[name].numel() for name in names])
    return {name: part.view(layout[name].shape) for name, part in zip(names, parts, strict=True)}
