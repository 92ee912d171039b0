"""Expected calibration error. Shapes: N samples, L labels, M bins."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.core.options import Range
from atoll.metrics.counts import arrays, tally
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows, rows
from atoll.metrics.probabilities import chances

TAKES = (CLASSES, BINARY, LABELS)
EXAMPLES = [{}, {"bins": 4}]


def calibration_error(bins: Annotated[int, Range(1, 10_000)] = 15) -> Metric:
    """Return how far confidence and frequency are apart: sum over M bins of |B_m| / n  |frequency - mean confidence|.

    (Naeini et al. 2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599, eq. 3.) Of classes the
    confidence is the highest probability, and the frequency that of right answers. Of a logit it is the probability of
    1, and the frequency that of ones; several labels count as so many samples. Bins are (m / M, (m + 1) / M], and 0
    belongs to the first.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows("calibration_error", TAKES, scores, targets, weight_N)
        confidence_N, happened_N, weight_N = _forecasts(samples)
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence_N.device)[1:-1]
        bin_N = torch.bucketize(confidence_N, edges)
        sums = {"weight": weight_N, "confidence": weight_N * confidence_N, "frequency": weight_N * happened_N}
        return {name: tally(bin_N, value_N, bins) for name, value_N in sums.items()}

    def finish(part: State) -> Figures:
        sums = arrays(part)
        total = sums["weight"].sum()
        gap = abs(sums["frequency"] - sums["confidence"]).sum()
        return {"calibration_error": float(gap / total) if total > 0 else float("nan")}

    def chart(part: State) -> dict[str, Any]:
        sums = arrays(part)
        used_M = sums["weight"] > 0
        weight_M = sums["weight"][used_M]
        return {
            "confidence": (sums["confidence"][used_M] / weight_M).tolist(),
            "frequency": (sums["frequency"][used_M] / weight_M).tolist(),
            "weight": weight_M.tolist(),
        }

    def plausible(sums: State, least: float, most: float) -> bool:
        weight_M = sums["weight"]
        return all(bool(((sums[n] >= 0) & (sums[n] <= weight_M + 1e-6)).all()) for n in ("confidence", "frequency"))

    return Metric(add, finish, chart=chart, larger_is_better=False, plausible=plausible)


def _forecasts(samples: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, whether what was said came true, and weight of each forecast."""
    chance_NK = chances(samples)
    if samples.form == CLASSES:
        confidence_N, predicted_N = chance_NK.max(1)
        return confidence_N, (predicted_N == samples.targets).double(), samples.weight_N
    weight_NL = samples.weight_N[:, None].expand_as(chance_NK)
    return chance_NK.flatten(), samples.target_columns.double().flatten(), weight_NL.flatten()
