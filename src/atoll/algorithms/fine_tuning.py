"""FedAvg with fine-tuning."""

from __future__ import annotations

from atoll.core.algorithm import Adapt, Algorithm
from atoll.core.options import Count, Positive


def fine_tuning(steps: Count = 20, lr: Positive | None = None) -> Algorithm:
    """Train one model by FedAvg, and let each client tune its copy by a few steps of its own before it uses it.

    The first thing to compare with (Yu et al. 2020, arXiv:2002.04758, section 3.1). `lr` is that of the plan unless
    given. Nothing of the tuning is sent.
    """
    return Algorithm(adapt=Adapt(steps, lr))
