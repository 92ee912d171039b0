"""Harrell's concordance index. Shapes: N samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import Array
from atoll.metrics.ranking import join
from atoll.metrics.survival import TAKES as TAKES
from atoll.metrics.survival import order_of, survival_arrays, survival_part


def concordance() -> Metric:
    """Return the share of comparable pairs in which the earlier event has the higher risk, equal risks counting half.

    (Harrell et al. 1982, doi:10.1001/jama.1982.03320430047030.) A pair is comparable if the earlier of two times is an
    event, or if of two equal times one is an event and the other is censored; two events at one time are not. Of
    weighted samples a pair counts by the product. Between places only pairs within a place count, as the strata of a
    stratified index: nobody sees the times of others.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        return survival_part("concordance", scores, targets, weight_N)

    def condense(part: State) -> State:
        pairs = comparable_pairs(part)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in pairs.items()}

    def finish_sums(sums: State) -> Figures:
        concordant, tied, total = (float(sums[name]) for name in ("concordant", "tied", "comparable"))
        return {"concordance": (concordant + tied / 2) / total if total else float("nan")}

    def plausible(sums: State, least: float, most: float) -> bool:
        concordant, tied, total = (float(sums[name]) for name in ("concordant", "tied", "comparable"))
        return min(concordant, tied) >= 0 and concordant + tied <= total <= most * most / 2

    return Metric(add, lambda part: finish_sums(condense(part)), join, condense, finish_sums, plausible=plausible)


def comparable_pairs(part: State) -> dict[str, float]:
    """Return the weight of the pairs that are concordant, tied in risk, and comparable, in O(N log(N)^2) steps.

    Two numbers in the order of time differ first at one bit, in which the later has a 1: for each bit, those with a 0
    are compared to those with a 1 that agree with them above it.
    """
    risk_N, time_N, event_N, weight_N = survival_arrays(part)
    pairs = dict.fromkeys(("concordant", "tied", "comparable"), 0.0)
    if np.isnan(risk_N).any():
        return dict.fromkeys(pairs, float("nan"))
    order_N, rank_N = order_of(time_N, event_N), np.unique(risk_N, return_inverse=True)[1]
    for bit in range(int(order_N.max(initial=0)).bit_length()):
        prefix_N, later_N = order_N >> (bit + 1), (order_N >> bit & 1).astype(bool)
        earlier_N = ~later_N & event_N
        first_N = prefix_N * (len(rank_N) + 1)
        keys_N = first_N + rank_N
        later = np.argsort(keys_N[later_N])
        below = _sums_below(keys_N[later_N][later], weight_N[later_N][later])
        start, equal, above, end = (
            below(each[earlier_N]) for each in (first_N, keys_N, keys_N + 1, first_N + len(rank_N))
        )
        weight = weight_N[earlier_N]
        pairs["concordant"] += float(weight @ (equal - start))
        pairs["tied"] += float(weight @ (above - equal))
        pairs["comparable"] += float(weight @ (end - start))
    return pairs


def _sums_below(keys: Array, weights: Array) -> Callable[[Array], Array]:
    """Return the function that sums the weights of keys, which are sorted, that are smaller than a number."""
    totals = np.concatenate([[0.0], np.cumsum(weights)])
    return lambda numbers: totals[np.searchsorted(keys, numbers)]
