"""The mean of clipped updates."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.aggregators.columns import combined, lengths
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import above

EXAMPLES = [{}, {"norm": 0.5}]


def norm_clipping(
    norm: Annotated[float, above(0, "leave it out for the median of the norms")] | None = None,
) -> Aggregator:
    """Average the updates, each scaled down to an L2 norm of at most `norm`, weights aside.

        1/n sum_i x_i min(1, norm / |x_i|)

    (Sun et al. 2019, arXiv:1911.07963, section 5.) Without `norm`, it is the median of the norms of the round. A bad
    client moves the result by at most 2 norm / n; nothing is filtered out. Any n will do; with the median, fewer than
    n/2 bad clients cannot raise the bound above the norms of the honest ones.
    """

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        length_C = lengths(updates_CD)
        bound = float(length_C.median()) if norm is None else norm
        share_C = (bound / length_C).clamp(max=1).nan_to_num(1.0)  # 0 / 0: a row of zeros stays one
        return combined(share_C / len(updates_CD), updates_CD)

    return stacked(rule, rotation_equivariant=True, bounded=True)
