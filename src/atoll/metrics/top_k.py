"""Top-k accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.metric import Metric
from atoll.core.options import Count
from atoll.metrics.forms import CLASSES, Rows
from atoll.metrics.sums import weighted_mean

TAKES = (CLASSES,)
EXAMPLES = [{}, {"k": 2}]


def top_k(k: Count = 5) -> Metric:
    """Return the share of samples whose true class is among the k of the highest scores, as `top_<k>`.

    Of equal scores the last class goes first, as in scikit-learn; a score that is NaN is never among them.
    """

    def hit(samples: Rows) -> Tensor:
        scores_NK = samples.scores
        own_N1 = scores_NK.gather(1, samples.targets.long()[:, None])
        later_NK = torch.arange(scores_NK.shape[1], device=scores_NK.device) > samples.targets[:, None]
        ahead_NK = ~(scores_NK < own_N1) & ((scores_NK != own_N1) | later_NK)
        return (ahead_NK.sum(1) < k) & ~own_N1.isnan()[:, 0]

    return weighted_mean("top_k", TAKES, hit, figure=f"top_{k}", counts=True)
