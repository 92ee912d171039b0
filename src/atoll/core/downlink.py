"""Downlink: encode the server's broadcast, and decode it as the clients do. Shapes: V, its packed vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from atoll.core.messages import Broadcast, Payload, State
from atoll.core.transform import Chain, Encoding
from atoll.core.wire import packed_size


class DecodedBroadcast(NamedTuple):
    """A broadcast as the clients decode it, and its size."""

    broadcast: Broadcast
    num_bytes: int
    """Bytes sent to a client that has the previous broadcast."""
    whole_bytes: int
    """Bytes sent to a client that has not."""
    payload: Payload | None = None
    """The encoded broadcast; None if it is sent without encoding."""


class Downlink(NamedTuple):
    """Encodes broadcasts by a chain; if it starts with `delta`, as the difference to the last decoded broadcast.

    With differences d_t = C(x_t - k_t) all clients hold k_{t+1} = k_t + d_t, so that the error of a codec C is part of
    the next difference (Gruntkowska et al. 2023, arXiv:2209.15218, algorithm 1, EF21-P). A client that missed some
    broadcasts is sent their differences, or the whole of k if that is smaller.
    """

    chain: Chain

    @property
    def by_difference(self) -> bool:
        """Whether differences are sent."""
        return any(step.against_known for step in self.chain.transforms)

    def send(
        self, broadcast: Broadcast, memory: Mapping[str, Tensor], encoding: Encoding | None
    ) -> tuple[DecodedBroadcast, State]:
        """Encode a broadcast, and decode it as clients do; `memory["known"]` is the last decoded broadcast.

        A chain without transforms needs no `encoding`.
        """
        vector_V, exact = broadcast.vector(), broadcast.exact()
        whole_bytes = packed_size(broadcast.plain())
        if not self.chain.transforms:
            return DecodedBroadcast(broadcast, whole_bytes, whole_bytes), {}
        assert encoding is not None
        known_V = memory.get("known")
        if self.by_difference and known_V is None:
            return DecodedBroadcast(broadcast, whole_bytes, whole_bytes), {"known": vector_V}
        chain_memory = {name: value for name, value in memory.items() if name != "known"}
        input_V = vector_V if known_V is None else vector_V - known_V
        payload, chain_memory = self.chain.encode(input_V, chain_memory, encoding)
        decoded_V, payload = self.chain.decode(payload), payload.beside(exact)
        num_bytes = packed_size(payload)
        if known_V is None:
            return DecodedBroadcast(broadcast.rebuilt(decoded_V, exact), num_bytes, num_bytes, payload), chain_memory
        known_V = known_V + decoded_V
        decoded = DecodedBroadcast(broadcast.rebuilt(known_V, exact), num_bytes, whole_bytes, payload)
        return decoded, {**chain_memory, "known": known_V}
