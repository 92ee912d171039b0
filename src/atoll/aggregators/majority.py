"""The majority vote on signs, folded as it comes."""

from __future__ import annotations

import torch

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Aggregate, State, Update


def majority() -> Aggregator:
    """Let every client vote once on each coordinate: sign(sum_k sign(delta_k)), and 0 where votes are even.

    (Bernstein et al. 2018, arXiv:1802.05957, distributed training by majority vote.) Weights are ignored: nobody has
    more than one vote, and extra vectors are plainly averaged. Each step has length `server.lr` in every coordinate.
    """

    def add(acc: State, update: Update) -> State:
        num = torch.tensor(update.weight.numel())
        sums = {"votes": update.delta_D.sign().sum(0), "weight": update.weight.sum(), "count": num}
        return merge(acc, sums | {f"aux.{name}": rows.sum(0) for name, rows in update.aux.items()})

    def merge(left: State, right: State) -> State:
        return {name: left[name] + right[name] for name in left} if left else right

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        count = acc["count"]
        aux = {name.removeprefix("aux."): value / count for name, value in acc.items() if name.startswith("aux.")}
        return Aggregate(acc["votes"].sign(), aux, float(acc["weight"]), int(count)), memory

    return Aggregator(add=add, merge=merge, finish=finish, unit_steps=True, bounded=True)
