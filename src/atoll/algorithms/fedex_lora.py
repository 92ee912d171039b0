"""FedEx-LoRA. Shapes: D parameters."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.core.adapters import add_rest, aggregation_error, rank_mask, rest_beside
from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.messages import HELD, Aggregate, State
from atoll.core.options import Count

EXAMPLES = [{}, {"ranks": [1, 2]}]


def fedex_lora(ranks: tuple[Count, ...] = ()) -> Algorithm:
    """Average the factors of adapters, and keep what that misses beside the frozen layer (Singhal et al. 2025).

    arXiv:2410.09432: what is kept is sum_i p_i B_i A_i - (sum_i p_i B_i) (sum_i p_i A_i). Its sum over all
    rounds goes down with the model, dense; up go the factors alone. Client number i has rank ranks[i mod len(ranks)],
    or that of the model.
    """

    def prepare(model: nn.Module) -> None:
        add_rest(model, "fedex_lora", ranks)

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        new_D = params_D + task.lr * aggregate.delta_D
        held_H = rest_beside(params_D, server[HELD], aggregate, new_D, task)
        return new_D, {**server, HELD: held_H}

    return Algorithm(
        prepare=prepare,
        mask=rank_mask(ranks),
        server_step=server_step,
        measure=aggregation_error,
        needs_updates=True,
        multiplies=True,
    )
