"""Contract of a defence of split learning: what a party does to what leaves it. Shapes: B samples of a piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atoll.core.plan import Plan

Key = Callable[[Tensor], bytes]
"""(values that noise is added to) -> the key of that noise."""


class Defence(NamedTuple):
    """A member of the family `split.defences`; a slot that is None changes nothing."""

    shape: Callable[[Tensor], Tensor] | None = None
    """Activations (B, ...) -> those that are sent and trained with; each sample by itself, differentiable."""
    hide: Callable[[Tensor, Key], Tensor] | None = None
    """(activations as shaped (B, ...), key) -> what is sent."""
    penalty: Callable[[Tensor, Tensor], Tensor] | None = None
    """(samples (B, ...), activations as shaped) -> a number that is added to the client's loss."""
    perturb: Callable[[Tensor, Tensor, Key], Tensor] | None = None
    """(gradients (B, ...), labels (B,), key) -> the gradients that whoever has the labels sends."""
    draws: bool = False
    """Whether it draws noise, which must be secret."""
    test_noise: bool = False
    """Whether all noise derives from the plan's seed: repeatable for tests, without any protection."""
    min_samples: int = 1
    """Samples of a piece that it needs; smaller ones, at the end of an epoch, go without its penalty."""
    binary: bool = False
    """Whether it knows two classes alone."""


def defences_of(plan: Plan) -> tuple[Defence, ...]:
    """Build the defences that a plan names."""
    return () if plan.split is None else tuple(part.build("split.defences") for part in plan.split.defences)
