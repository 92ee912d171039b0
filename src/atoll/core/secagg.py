"""What a plan says about secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from atoll.core.options import Count, Positive, ShareBelowOne, at_least
from atoll.core.parts import Part
from atoll.core.section import Section

MIN_SURVIVORS = 3
"""A sum of two tells each of the two the other's update; where a plan does not say, at least so many are added."""


@dataclass(frozen=True, kw_only=True)
class Secagg(Section, key="secagg"):
    """How the server learns the sum of the updates, and no update."""

    scheme: Part = field(default_factory=lambda: Part("pairwise"))
    """Who must not collude with whom: `pairwise` masks, `additive` shares for several servers, or `ckks`."""
    clip: Positive = 4.0
    """Largest size of one value of an update; larger ones are cut."""
    modulus_bits: Literal[32, 64] = 32
    """Bits of one value under its mask: 64 are twice as many bytes, and finer."""
    groups: Count = 1
    """Into how many groups a cohort is split at random: each has a sum of its own, and the rule sees these."""
    min_survivors: Annotated[int, at_least(2, "a sum of one update is that update")] | None = None
    """No sum of fewer updates is opened; MIN_SURVIVORS if unset."""
    lost: ShareBelowOne = 0.0
    """In a simulation: the chance of a client to fall silent in a session, at a step drawn by seed."""

    @property
    def least(self) -> int:
        """The smallest number of updates whose sum is opened."""
        return MIN_SURVIVORS if self.min_survivors is None else self.min_survivors
