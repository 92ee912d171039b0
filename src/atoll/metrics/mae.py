"""Mean absolute error."""

from __future__ import annotations

from torch import Tensor

from atoll.core.metric import Metric
from atoll.metrics.forms import NUMBERS, Rows
from atoll.metrics.sums import weighted_mean

TAKES = (NUMBERS,)


def mae() -> Metric:
    """Return the mean of |score - target|, over samples and outputs."""

    def error(samples: Rows) -> Tensor:
        return (samples.columns.double() - samples.target_columns).abs()

    return weighted_mean("mae", TAKES, error, larger_is_better=False)
