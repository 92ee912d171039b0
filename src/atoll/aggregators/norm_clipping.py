"""The mean of clipped updates."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.aggregators.columns import row_norms, weighted_sum
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import above

EXAMPLES = [{}, {"norm": 0.5}]


def norm_clipping(
    norm: Annotated[float, above(0, "leave it out for the median of the norms")] | None = None,
) -> Aggregator:
    """Average the updates, each scaled down to an L2 norm of at most `norm`; ignore weights.

        1/n sum_i x_i min(1, norm / |x_i|)

    (Sun et al. 2019, arXiv:1911.07963, section 5.) The default of `norm` is the median of the round's norms. A bad
    client moves the result by at most 2 norm / n; no update is removed. Any n is allowed; with the median, fewer than
    n/2 bad clients cannot raise the bound above the norms of the honest ones.
    """

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        norm_C = row_norms(updates_CD)
        bound = float(norm_C.median()) if norm is None else norm
        share_C = (bound / norm_C).clamp(max=1).nan_to_num(1.0)  # 0 / 0: a row of zeros stays as it is
        return weighted_sum(share_C / len(updates_CD), updates_CD)

    return stacked(rule, rotation_equivariant=True, bounded=True)
