"""FLoRA. Shapes: D parameters."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.core.adapters import add_rest, aggregation_error, fresh_factors, rank_mask, rest_beside
from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.messages import HELD, Aggregate, State
from atoll.core.options import Count

EXAMPLES = [{}, {"ranks": [1, 2]}]


def flora(ranks: tuple[Count, ...] = ()) -> Algorithm:
    """Stack the clients' factors, so that their product is the mean of the clients' products (Wang et al. 2024).

    arXiv:2409.05976: [p_1 B_1, ..., p_C B_C] [A_1; ...; A_C] = sum_i p_i B_i A_i is added to the frozen layer
    that all hold, and adapters begin anew. The sum of all rounds goes down with the model, dense; up go the factors
    alone. Client number i has rank ranks[i mod len(ranks)], or that of the model.
    """

    def prepare(model: nn.Module) -> None:
        add_rest(model, "flora", ranks)

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        new_D = fresh_factors(task.spec, params_D + task.lr * aggregate.delta_D, task.rng)
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
