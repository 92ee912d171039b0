"""Metric: what is measured of a model's scores, as a monoid of named tensors. Shapes: N samples, K classes or labels.

A problem turns outputs and targets into what metrics take: scores, targets and weights, N of each. That is (N, K)
logits with (N,) classes, (N,) logits with (N,) zeros and ones, (N, K) logits with (N, K) zeros and ones, numbers with
numbers of the same shape, or (N,) risks with (N, 2) times and events.

Parts of one place (slices, worker processes) are merged to the figures of all samples, exactly. Between places nothing
but sums may travel: `condense` makes of the part of one place named sums that add up over places, also in secret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from atoll.core.messages import State

Figures = dict[str, float]
"""Named numbers; NaN where one is not defined, such as a correlation of equal numbers."""


def add_up(one: State, other: State) -> State:
    """Merge two parts that are sums."""
    return {name: value + other[name] for name, value in one.items()}


class Metric(NamedTuple):
    """A measure: the part that some samples have in it, how parts merge, and what figures the whole gives."""

    add: Callable[[Tensor, Tensor, Tensor], State]
    """(scores, targets, weight_N) -> the part of these samples; one of weight 0 has no share."""
    finish: Callable[[State], Figures]
    """The part of all samples -> figures."""
    merge: Callable[[State, State], State] = add_up
    """The parts of some samples and of others -> the part of both."""
    condense: Callable[[State], State] | None = None
    """The part of one place -> float64 sums that add up over places; None: parts are such sums already."""
    finish_sums: Callable[[State], Figures] | None = None
    """`finish` for the sums of several places, with the bound of its error if it has one; None: `finish`."""
    chart: Callable[[State], dict[str, Any]] | None = None
    """The part of all samples -> plain data that the report draws; None: nothing."""
    larger_is_better: bool = True
    main: str = ""
    """The name of its first figure, if that is not its own name."""
    plausible: Callable[[State, float, float], bool] | None = None
    """(sums of a place, least and largest weight of its samples) -> whether samples can have such sums.

    A server asks this of sums that a client sent, after names, shapes and finiteness; None: anything is plausible.
    """
    sensitivity: Callable[[State], float] | None = None
    """Condensed sums, if they are whole numbers -> the largest L2 distance by which one more sample moves them.

    None: there is no such bound, so that no noise can hide a sample.
    """
