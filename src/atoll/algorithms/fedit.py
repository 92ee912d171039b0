"""FedIT."""

from __future__ import annotations

from torch import nn

from atoll.core.adapters import adapted_layers, aggregation_error, rank_mask
from atoll.core.algorithm import Algorithm
from atoll.core.options import Count

EXAMPLES = [{}, {"ranks": [1, 2], "measure": False}]


def fedit(ranks: tuple[Count, ...] = (), measure: bool = True) -> Algorithm:
    """Average the two factors of low-rank adapters each by itself (Zhang et al. 2024, arXiv:2305.05644).

    B' A' = (sum_i p_i B_i) (sum_i p_i A_i) is not the mean sum_i p_i B_i A_i of the clients' products: `measure` writes
    the relative error into the metrics of a round, where the server may see single updates. Client number i has rank
    ranks[i mod len(ranks)], or that of the model.
    """

    def prepare(model: nn.Module) -> None:
        adapted_layers(model, "fedit", ranks)

    return Algorithm(prepare=prepare, mask=rank_mask(ranks), measure=aggregation_error if measure else None)
