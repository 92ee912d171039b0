"""Attack: what a bad client does to its data or its update, alone or together with others.

Shapes: C clients, D parameters. Slots that are None leave things as an honest client would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.core.messages import Update


class Knowledge(NamedTuple):
    """What an attacker may look at: the model that was sent, the number of classes, the attempt, its own randomness.

    Those who see the whole cohort also know the server's rule.
    """

    params_D: Tensor
    num_classes: int
    attempt: int
    rng: np.random.Generator
    aggregate: Callable[[Update], Tensor] | None = None
    """(stacked updates of the cohort) -> what the server would make of them; None to a client on its own."""
    rotation_equivariant: bool = False
    """Whether the rule goes by lengths and angles alone, so that it may be asked in other coordinates."""


class Attack(NamedTuple):
    """The slots of an attack."""

    data: Callable[[Tensor, Tensor, Knowledge], tuple[Tensor, Tensor]] | None = None
    """(features, labels) of a bad client's samples -> what it trains on instead."""
    update: Callable[[Update, Knowledge], Update] | None = None
    """A bad client's honest update -> what it sends instead."""
    collude: Callable[[Update, Tensor, Knowledge], Update] | None = None
    """(stacked updates of the cohort, mask of the bad ones) -> stacked updates; sees every honest update."""
    knows: str = "its own data and update"
    trigger: Callable[[Tensor], Tensor] | None = None
    """Features, as the model sees them -> the same with the trigger painted on; for attacks that plant one."""
    target: int | None = None
    """The class that the trigger is to bring about."""
    finite: bool = True
    """Whether it sends numbers only, never NaN or infinity."""
