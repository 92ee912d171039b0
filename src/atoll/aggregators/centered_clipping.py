"""Centered clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import row_norms, weighted_sum
from atoll.core.aggregator import Aggregator, stacked_with_memory
from atoll.core.options import Count, Positive

EXAMPLE = {"tau": 1.0}


def centered_clipping(tau: Positive, iterations: Count = 1) -> Aggregator:
    """Clip the distance of each update to the last aggregate v at tau, and move v by the mean; ignore weights.

        v <- v + 1/n sum_i (x_i - v) min(1, tau / |x_i - v|)

    (Karimireddy et al. 2021, arXiv:2012.10333, equation CC.) v starts at 0 and is kept between rounds. Proved for less
    than 1/10 bad clients (theorem III), with worker momentum: put `momentum` in uplink. For any number of bad clients,
    each moves the result by at most 2 tau / n per iteration. Any n is allowed.
    """

    def rule(updates_CD: Tensor, last_D: Tensor | None) -> Tensor:
        centre_D = torch.zeros_like(updates_CD[0]) if last_D is None else last_D
        for _ in range(iterations):
            share_C = (tau / row_norms(updates_CD, centre_D)).clamp(max=1) / len(updates_CD)
            centre_D = weighted_sum(share_C, updates_CD).add_(centre_D, alpha=float(1 - share_C.sum()))
        return centre_D

    return stacked_with_memory(rule, bounded=True)
