"""The weighted mean, as a running sum."""

from __future__ import annotations

import torch

from atoll.core.aggregator import Aggregator, merge_sums
from atoll.core.messages import Aggregate, State, Update


def mean() -> Aggregator:
    """Average the updates by their weights: sum_k w_k delta_k / sum_k w_k (McMahan et al. 2017, algorithm 1)."""

    def add(acc: State, update: Update) -> State:
        weight_C = update.weight.to(update.delta_D.dtype)
        sums = {"delta": weight_C @ update.delta_D, "weight": weight_C.sum(), "count": torch.tensor(weight_C.numel())}
        sums |= {f"aux.{name}": torch.tensordot(weight_C, rows, dims=1) for name, rows in update.aux.items()}
        return merge_sums(acc, sums)

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        total = acc["weight"]
        aux = {name.removeprefix("aux."): value / total for name, value in acc.items() if name.startswith("aux.")}
        return Aggregate(
            delta_D=acc["delta"] / total, aux=aux, weight=float(total), num_clients=int(acc["count"])
        ), memory

    return Aggregator(add=add, merge=merge_sums, finish=finish, weighted=True, translation_equivariant=True)
