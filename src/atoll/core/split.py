"""The plan's table about split learning."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from atoll.core.errors import PlanError
from atoll.core.options import Count, above, at_least
from atoll.core.parts import Part
from atoll.core.section import Section


@dataclass(frozen=True, kw_only=True)
class Split(Section, key="split"):
    """Settings of split learning, by which clients train the first layers of a model and the server the others."""

    way: Literal["in_turn", "splitfed_v1", "splitfed_v2"] = "splitfed_v1"
    """Who trains when: clients one after another, or all of a cohort at once; see `split/ways`."""
    cut: str | Annotated[int, at_least(0, "the first layer is 0")] = ""
    """Required: the last layer of the clients, a module's name such as "features.3" or its place in a sequential
    model."""
    tail: str | Annotated[int, at_least(1, "the first layer is 0")] | None = None
    """From this layer on the model is the clients' again, so that labels stay with them; the server has the labels if
    left out."""
    micro_batches: Count = 1
    """Pieces in which a batch is sent; their gradients add up to that of the batch."""
    in_flight: Count | None = None
    """Pieces of a batch that may be on their way at a time; all of them if left out."""
    handover: Literal["server", "peer"] = "server"
    """How a client that trains in turn gets the layers of the one before: through the server, or from that client."""
    codecs: tuple[Part, ...] = ()
    """What activations and gradients go through at the cut, in this order; exact if empty."""
    bandwidth: Annotated[float, above(0, "leave it out for no limit")] | None = None
    """Bytes a second of each client's link, each way, for simulated seconds."""
    latency: Annotated[float, at_least(0)] | None = None
    """Seconds of a round trip between a client and the server, for simulated seconds."""

    def check(self) -> None:
        """Refuse a cut that is missing, a handover that nobody makes, and a window that is no limit."""
        if self.cut == "":
            values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
            given = {name: value for name, (value, default) in values.items() if value != default}
            raise PlanError(
                f"split.cut is missing, got {given}: set it to the last layer of the clients, e.g. --set split.cut=2"
            )
        if self.handover == "peer" and self.way != "in_turn":
            raise PlanError(
                f'split.handover is "peer", but clients of {self.way} do not hand their layers on: set split.way = '
                '"in_turn", or leave split.handover out'
            )
        if self.in_flight is not None and self.in_flight > self.micro_batches:
            raise PlanError(
                f"split.in_flight is {self.in_flight}, but a batch has {self.micro_batches} pieces: raise "
                "split.micro_batches, or leave split.in_flight out"
            )

    @property
    def takes_time(self) -> bool:
        """Whether messages take simulated seconds."""
        return self.bandwidth is not None or self.latency is not None
