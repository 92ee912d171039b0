"""What of a plan travels, what stays with clients, and how many bytes that is, known before a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.commit.rehearsal import made_up_updates
from atoll.core.messages import STATISTICS
from atoll.core.transform import Encoding
from atoll.train.job import Job, broadcast_of, first_server, layout_of

BOTH, DOWN, UP, KEPT, FROZEN = "both ways", "down", "up", "kept", "frozen"
"""Where values go: to clients and back, to clients, from clients, nowhere, or nowhere and never trained."""


class Values(NamedTuple):
    """Some values of a plan, and where they go."""

    name: str
    shape: tuple[int, ...]
    num_values: int
    num_bytes: int
    goes: str


class Travels(NamedTuple):
    """What of a plan travels and what stays."""

    values: tuple[Values, ...]
    bytes_down: int
    """Bytes of the first broadcast to one client, packed; later ones may be differences."""
    bytes_up: int | None
    """Least bytes of an update of one client, packed, in a rehearsal; None under secure aggregation."""

    def total(self, *goes: str) -> int:
        """Return the number of values that go one of these ways."""
        return sum(each.num_values for each in self.values if each.goes in goes)


def travels(job: Job) -> Travels:
    """Return what travels in a job's rounds, by name, and what stays with its clients."""
    layout, sent = layout_of(job), broadcast_of(job, job.first_D, first_server(job, job.first_D))
    known = {slot.name for slot in (*job.spec.slots, *job.spec.kept)} | set(job.local_buffers)
    parameters, buffers = dict(job.model.named_parameters()), dict(job.model.named_buffers())
    size = job.spec.dtype.itemsize
    held = set(job.spec.held)
    values = [Values(s.name, s.shape, s.size, s.size * size, DOWN if s in held else BOTH) for s in job.spec.slots]
    values += [_values(name, value, DOWN) for name, value in sent.aux.items() if name != STATISTICS]
    values += [_values(name, value, UP) for name, value in layout.aux.items() if name != STATISTICS]
    values += [Values(s.name, s.shape, s.size, s.size * size, KEPT) for s in job.spec.kept]
    values += [_values(name, buffers[name], KEPT) for name in job.local_buffers]
    if job.work.uses_algorithm:
        memory = job.algorithm.init_client(job.trainable(job.first_D))
        values += [_values(f"memory of {name}", value, KEPT) for name, value in memory.items()]
    if not job.architectures:
        values += [_values(name, value, FROZEN) for name, value in parameters.items() if name not in known]
    first, _ = job.downlink.send(sent, {}, Encoding(job.spec.without_buffers, 0, np.random.default_rng(0)))
    bytes_up = None if job.secure is not None else made_up_updates(job, layout, (1.0,))[1]
    return Travels(tuple(values), first.num_bytes, bytes_up)


def _values(name: str, value: Tensor, goes: str) -> Values:
    return Values(name, tuple(value.shape), value.numel(), value.nbytes, goes)
