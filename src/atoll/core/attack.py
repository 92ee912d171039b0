"""Attack: changes that bad clients make to their data or updates, alone or together.

Shapes: C clients, D parameters. A slot that is None changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.core.messages import Update


class Knowledge(NamedTuple):
    """Information that an attacker has. Attackers that see the whole cohort also know the server's rule."""

    params_D: Tensor
    """The broadcast model."""
    num_classes: int
    attempt: int
    rng: np.random.Generator
    """Generator for this attack and attempt."""
    aggregate: Callable[[Update], Tensor] | None = None
    """(stacked updates of the cohort) -> the server's aggregate of them; None for an attacker that acts alone."""
    rotation_equivariant: bool = False
    """Whether the rule is rotation equivariant, so that `aggregate` may be called in other coordinates."""


class Attack(NamedTuple):
    """The slots of an attack."""

    data: Callable[[Tensor, Tensor, Knowledge], tuple[Tensor, Tensor]] | None = None
    """(features, labels, knowledge) of a bad client's samples -> features and labels that it trains on instead."""
    update: Callable[[Update, Knowledge], Update] | None = None
    """(honest update of a bad client, knowledge) -> update that it sends instead."""
    collude: Callable[[Update, Tensor, Knowledge], Update] | None = None
    """(stacked updates of the cohort, mask of the bad ones, knowledge) -> stacked updates; sees every honest update."""
    knows: str = "its own data and update"
    """Threat model as text: the information that the attack assumes."""
    trigger: Callable[[Tensor], Tensor] | None = None
    """(features after scaling) -> features with the trigger painted on, for backdoor attacks."""
    target: int | None = None
    """Class that the trigger should cause."""
    needs_classes: bool = False
    """Whether it changes samples of a class, or makes them look like one."""
    finite: bool = True
    """Whether it never sends NaN or infinity."""
