"""FedAvg with fine-tuning."""

from __future__ import annotations

from typing import Annotated

from atoll.core.algorithm import Adapt, Algorithm
from atoll.core.options import Positive, at_least


def fine_tuning(steps: Annotated[int, at_least(0, "0 is fedavg")] = 20, lr: Positive | None = None) -> Algorithm:
    """Train one model by FedAvg, and let each client tune its copy by a few steps of its own before it uses it.

    The first thing to compare with (Yu et al. 2020, arXiv:2002.04758, section 3.1). `lr` is that of the plan unless
    given. Nothing of the tuning is sent.
    """
    return Algorithm(adapt=Adapt(steps, lr))
