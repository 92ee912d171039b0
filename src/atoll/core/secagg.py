"""What a plan says about secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.section import Section

MIN_SURVIVORS = 3
"""A sum of two tells each of the two the other's update; where a plan does not say, at least so many are added."""


@dataclass(frozen=True, kw_only=True)
class Secagg(Section):
    """How the server learns the sum of the updates, and no update."""

    scheme: Part = field(default_factory=lambda: Part("pairwise"))
    """Who must not collude with whom: `pairwise` masks, `additive` shares for several servers, or `ckks`."""
    clip: float = 4.0
    """Largest size of one value of an update; larger ones are cut."""
    modulus_bits: Literal[32, 64] = 32
    """Bits of one value under its mask: 64 are twice as many bytes, and finer."""
    groups: int = 1
    """Into how many groups a cohort is split at random: each has a sum of its own, and the rule sees these."""
    min_survivors: int | None = None
    """No sum of fewer updates is opened; MIN_SURVIVORS if unset."""
    lost: float = 0.0
    """In a simulation: the chance of a client to fall silent in a session, at a step drawn by seed."""

    def check(self) -> None:
        """Refuse what cannot be right."""
        if not 0 < self.clip < float("inf"):
            raise PlanError(f"secagg.clip must be above 0 and finite, got {self.clip}")
        if self.groups < 1:
            raise PlanError(f"secagg.groups must be at least 1, got {self.groups}")
        if self.min_survivors is not None and self.min_survivors < 2:
            raise PlanError(
                f"secagg.min_survivors must be at least 2, got {self.min_survivors}: a sum of one update is that update"
            )
        if not 0 <= self.lost < 1:
            raise PlanError(f"secagg.lost must be in [0, 1), got {self.lost}")

    @property
    def least(self) -> int:
        """The smallest number of updates whose sum is opened."""
        return MIN_SURVIVORS if self.min_survivors is None else self.min_survivors
