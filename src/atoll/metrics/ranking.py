"""Metrics of how scores rank samples: exact from all scores of one place, bounded from histograms of several.

Shapes: N samples, K classes or labels, G groups of equal scores, or bins, in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import Array, arrays, mean_or_nan, tally
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows, as_columns, rows
from atoll.metrics.probabilities import chances

TAKES = (CLASSES, BINARY, LABELS)
NUM_BINS = 4096
MAX_COLUMNS = 1024
"""Maximum number of classes or labels: every score is kept, and every class has two histograms."""
WIDEST = 1024.0
"""Bins are equal steps of asinh(log-odds) up to this: 0.0037 wide about 0, and 0.37 % of the log-odds far out."""


class Bounds(NamedTuple):
    """A figure from groups of equal scores, and its least and largest value if scores of a group differ after all."""

    value: float
    low: float
    high: float


Measure = Callable[[Array, Array], Bounds | None]
"""Weights of the positive and of the negative samples of each group -> a figure; None if they have none."""


def keep(**values: Tensor) -> State:
    """Return values of samples as a part that merges by `join`: copies, as batches may be written over."""
    return {name: value.clone() for name, value in values.items()}


def join(one: State, other: State) -> State:
    """Merge two parts that keep samples: one after the other."""
    return {name: torch.cat([value, other[name]]) for name, value in one.items()}


def ranked(name: str, measure: Measure) -> Metric:
    """Return the metric of a measure of rankings, the mean over the classes or labels that have one.

    A class is ranked against the rest by its probability, a label by its logit. `<name>_error` of several places is
    the largest distance that the figure can have from the one of all samples together.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows(name, TAKES, scores, targets, weight_N)
        if samples.columns.shape[1] > MAX_COLUMNS:
            raise PlanError(
                f"{name} takes at most {MAX_COLUMNS} classes or labels, as it keeps every score: got "
                f"{samples.columns.shape[1]}; choose accuracy, top_k, f1 or perplexity"
            )
        return keep(scores=samples.scores, targets=samples.targets, weight=samples.weight_N)

    def finish(part: State) -> Figures:
        found = [measure(*_grouped(*column)) for column in _columns(part)]
        return {name: _mean([each.value for each in found if each is not None])}

    def condense(part: State) -> State:
        histograms = [_histogram(*column) for column in _columns(part, log_odds=True)]
        return {
            "positive": torch.stack([positive_G for positive_G, _ in histograms]),
            "negative": torch.stack([negative_G for _, negative_G in histograms]),
        }

    def finish_sums(sums: State) -> Figures:
        tables = arrays(sums)
        found = [measure(*pair) for pair in zip(tables["positive"], tables["negative"], strict=True)]
        known = [each for each in found if each is not None]
        error = [max(each.high - each.value, each.value - each.low) for each in known]
        return {name: _mean([each.value for each in known]), f"{name}_error": _mean(error)}

    def sensitivity(sums: State) -> float:
        return math.sqrt(len(sums["positive"]))  # a count of each class or label

    def plausible(sums: State, least: float, most: float) -> bool:
        totals_K = (sums["positive"] + sums["negative"]).sum(1)
        counts = all(bool((value >= 0).all()) for value in sums.values())
        return counts and bool((totals_K >= least).all() and (totals_K <= most).all())

    return Metric(add, finish, join, condense, finish_sums, plausible=plausible, sensitivity=sensitivity)


def _grouped(scores_N: Tensor, positive_N: Tensor, weight_N: Tensor) -> tuple[Array, Array]:
    """Return the weights of positive and of negative samples of each group of equal scores; NaN if a score is."""
    if bool(scores_N.isnan().any()):
        return np.full(1, math.nan), np.full(1, math.nan)
    values, group_N = torch.unique(scores_N, return_inverse=True)
    positive_G, negative_G = _by_kind(group_N, positive_N, weight_N, len(values))
    return positive_G.cpu().numpy(), negative_G.cpu().numpy()


def _histogram(log_odds_N: Tensor, positive_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of positive and of negative samples in each bin of the log-odds; NaN if one is."""
    if bool(log_odds_N.isnan().any()):
        unknown = torch.full((NUM_BINS,), math.nan, dtype=torch.float64)
        return unknown, unknown
    place_N = torch.asinh(log_odds_N.double()) / math.asinh(WIDEST)
    bin_N = ((place_N.clamp(-1, 1) + 1) / 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    return _by_kind(bin_N, positive_N, weight_N, NUM_BINS)


def _by_kind(group_N: Tensor, positive_N: Tensor, weight_N: Tensor, length: int) -> tuple[Tensor, Tensor]:
    positive_G = tally(group_N[positive_N], weight_N[positive_N], length)
    return positive_G, tally(group_N[~positive_N], weight_N[~positive_N], length)


def _mean(values: list[float]) -> float:
    return mean_or_nan(np.array(values))


def _columns(part: State, *, log_odds: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield scores, or log-odds, whether they are of positive samples, and weights, for every class or label."""
    scores, targets, weight_N = part["scores"], part["targets"], part["weight"]
    if scores.dim() == 2 and targets.dim() == 1:
        chance_NK = chances(Rows(CLASSES, scores, targets, weight_N))
        for number, chance_N in enumerate(chance_NK.unbind(1)):
            yield chance_N.logit() if log_odds else chance_N, targets == number, weight_N
        return
    for scores_N, targets_N in zip(as_columns(scores).unbind(1), as_columns(targets).unbind(1), strict=True):
        yield scores_N, targets_N == 1, weight_N
