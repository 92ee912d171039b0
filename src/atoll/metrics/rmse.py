"""Root of the mean squared error."""

from __future__ import annotations

import numpy as np

from atoll.core.metric import Metric
from atoll.metrics.forms import NUMBERS
from atoll.metrics.sums import squared_errors, weighted_mean

TAKES = (NUMBERS,)


def rmse() -> Metric:
    """Return the root of the mean of (score - target)^2; of several outputs the mean of their roots."""
    return weighted_mean("rmse", TAKES, squared_errors, after=np.sqrt, larger_is_better=False)
