"""What a plan says about secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from atoll.core.options import Count, Positive, ShareBelowOne
from atoll.core.parts import Part
from atoll.core.section import Section


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
    lost: ShareBelowOne = 0.0
    """In a simulation: the chance of a client to fall silent in a session, at a step drawn by seed."""
