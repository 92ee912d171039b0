"""Perplexity."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.metric import Metric
from atoll.metrics.counts import Array
from atoll.metrics.forms import CLASSES, Rows
from atoll.metrics.sums import weighted_mean

TAKES = (CLASSES,)
NUMBERS_AT_ONCE = 2**22
"""Scores that are made float64 together: vocabularies are long."""


def perplexity() -> Metric:
    """Return exp of the mean negative log likelihood of the targets, over samples or positions that count."""

    def negative_log_likelihood(samples: Rows) -> Tensor:
        length = max(1, NUMBERS_AT_ONCE // max(1, samples.scores.shape[1]))
        pieces = zip(torch.split(samples.scores, length), torch.split(samples.targets, length), strict=True)
        return torch.cat([_surprise(scores_NK, target_N) for scores_NK, target_N in pieces])

    return weighted_mean("perplexity", TAKES, negative_log_likelihood, after=_exp, larger_is_better=False)


def _surprise(scores_NK: Tensor, target_N: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores_NK.double(), target_N.long(), reduction="none")


def _exp(mean: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(mean)
