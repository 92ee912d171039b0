"""The weighted mean, folded as it comes."""

from __future__ import annotations

import torch

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Aggregate, State, Update


def mean() -> Aggregator:
    """Average the updates by their weights: sum_k w_k delta_k / sum_k w_k (McMahan et al. 2017, algorithm 1)."""

    def add(acc: State, update: Update) -> State:
        weight_C = update.weight.to(update.delta_D.dtype)
        sums = {"delta": weight_C @ update.delta_D, "weight": weight_C.sum(), "count": torch.tensor(weight_C.numel())}
        sums |= {f"aux.{name}": torch.tensordot(weight_C, rows, dims=1) for name, rows in update.aux.items()}
        return merge(acc, sums)

    def merge(left: State, right: State) -> State:
        return {name: left[name] + right[name] for name in left} if left else right

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        total = acc["weight"]
        aux = {name.removeprefix("aux."): value / total for name, value in acc.items() if name.startswith("aux.")}
        return Aggregate(acc["delta"] / total, aux, float(total), int(acc["count"])), memory

    return Aggregator(add=add, merge=merge, finish=finish, weighted=True, translation_equivariant=True)
