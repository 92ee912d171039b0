"""FFA-LoRA."""

from __future__ import annotations

from torch import nn

from atoll.core.adapters import adapted_layers, factor, rank_mask
from atoll.core.algorithm import Algorithm
from atoll.core.options import Count

EXAMPLES = [{}, {"ranks": [1, 2]}]


def ffa_lora(ranks: tuple[Count, ...] = ()) -> Algorithm:
    """Freeze the factor A of low-rank adapters at its first values (Sun et al. 2024, arXiv:2403.12313).

    Only B is trained and sent, half of the adapter. The mean is exact, (sum_i p_i B_i) A = sum_i p_i B_i A, and so is
    whatever else is linear: secure sums, noise, robust rules. Client number i has rank ranks[i mod len(ranks)], or that
    of the model.
    """

    def prepare(model: nn.Module) -> None:
        for layer in adapted_layers(model, "ffa_lora", ranks).values():
            factor(layer, "A").requires_grad_(False)

    return Algorithm(prepare=prepare, mask=rank_mask(ranks))
