"""Problem: what is learnt. It brings a loss, metrics, and the form in which metrics take a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atoll.core.parts import Part

IGNORED = -100
"""The label of a position that counts for nothing."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one number a sample, (B,)."""


class Scored(NamedTuple):
    """Outputs and targets as metrics take them; N samples, or positions of sequences."""

    scores: Tensor
    targets: Tensor
    weight_N: Tensor


class Problem(NamedTuple):
    """A kind of problem; pure functions and names."""

    kind: str
    """The kind of targets that it takes: see `data/targets.py`."""
    loss: Part
    """What is minimised unless a plan says otherwise."""
    metrics: tuple[Part, ...]
    """What is measured unless a plan says otherwise; the first figure of the first is the problem's main one."""
    scored: Callable[[Tensor, Tensor], Scored]
    """(outputs, targets) of a batch -> what metrics take."""
