"""The plan's table about secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from atoll.core.options import Count, Positive, ShareBelowOne, at_least
from atoll.core.parts import Part
from atoll.core.section import Section

MIN_SURVIVORS = 3
"""Default minimum of survivors: from a sum of two updates, each of the two clients can compute the other's."""


@dataclass(frozen=True, kw_only=True)
class Secagg(Section, key="secagg"):
    """Settings of secure aggregation, by which the server learns the sum of the updates but no single update."""

    scheme: Part = field(default_factory=lambda: Part("pairwise"))
    """Cryptographic scheme: `pairwise` masks, `additive` shares for several servers, or `ckks`."""
    clip: Positive = 4.0
    """Maximum absolute value of an entry of an update; larger ones are cut to it."""
    modulus_bits: Literal[32, 64] = 32
    """Bits of one masked value: 64 doubles the bytes and rounds more finely."""
    groups: Count = 1
    """Number of random groups of a cohort: each has its own sum, and the aggregator sees one row for each group."""
    min_survivors: Annotated[int, at_least(2, "a sum of one update is that update")] | None = None
    """Minimum number of updates in a sum that is opened; MIN_SURVIVORS if unset."""
    lost: ShareBelowOne = 0.0
    """In a simulation: probability that a client drops out of a session, at a step drawn by seed."""

    @property
    def required_survivors(self) -> int:
        """Minimum number of updates in a sum that is opened, with the default filled in."""
        return MIN_SURVIVORS if self.min_survivors is None else self.min_survivors
