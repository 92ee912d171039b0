"""Downlink: what the server sends, as the clients hear it. Shapes: V, the packed vector of a broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from atoll.core.messages import Broadcast, Payload, State
from atoll.core.transform import Chain, Encoding
from atoll.core.wire import packed_size


class Heard(NamedTuple):
    """A broadcast at the clients' end."""

    broadcast: Broadcast
    num_bytes: int
    """What travels to those who heard the one before."""
    whole_bytes: int
    """What travels to those who did not."""
    payload: Payload | None = None
    """What travels through the chain; None where the broadcast goes as it is."""


class Downlink(NamedTuple):
    """Sends a broadcast through a chain; if this begins with `delta`, as the difference to what clients know.

    With differences d_t = C(x_t - k_t) everybody knows k_{t+1} = k_t + d_t, so that whatever a codec C leaves out is in
    the next difference (Gruntkowska et al. 2023, arXiv:2209.15218, algorithm 1, EF21-P). Who missed some broadcasts is
    sent those, or all of k if that is less.
    """

    chain: Chain

    @property
    def by_difference(self) -> bool:
        """Whether differences are sent."""
        return any(step.against_known for step in self.chain.transforms)

    def send(self, broadcast: Broadcast, memory: Mapping[str, Tensor], encoding: Encoding) -> tuple[Heard, State]:
        """Encode a broadcast, and decode it as clients do."""
        vector_V, exact = broadcast.vector(), broadcast.exact()
        whole_bytes = packed_size(broadcast.plain())
        if not self.chain.transforms:
            return Heard(broadcast, whole_bytes, whole_bytes), {}
        known_V = memory.get("known")
        if self.by_difference and known_V is None:
            return Heard(broadcast, whole_bytes, whole_bytes), {"known": vector_V}
        others = {name: value for name, value in memory.items() if name != "known"}
        payload, others = self.chain.encode(vector_V if known_V is None else vector_V - known_V, others, encoding)
        heard_V, payload = self.chain.decode(payload), payload.beside(exact)
        num_bytes = packed_size(payload)
        if known_V is None:
            return Heard(broadcast.rebuilt(heard_V, exact), num_bytes, num_bytes, payload), others
        heard_V = known_V + heard_V
        return Heard(broadcast.rebuilt(heard_V, exact), num_bytes, whole_bytes, payload), {**others, "known": heard_V}
