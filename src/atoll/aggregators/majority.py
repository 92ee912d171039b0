"""The majority vote on signs, as a running sum."""

from __future__ import annotations

import torch

from atoll.core.aggregator import Aggregator, merge_sums
from atoll.core.messages import Aggregate, State, Update


def majority() -> Aggregator:
    """Take the majority of the signs in each coordinate: sign(sum_k sign(delta_k)), and 0 where votes are even.

    (Bernstein et al. 2018, arXiv:1802.05957, distributed training by majority vote.) Weights are ignored: each client
    has one vote. Extra vectors are averaged. Each step has length `server.lr` in every coordinate.
    """

    def add(acc: State, update: Update) -> State:
        num = torch.tensor(update.weight.numel())
        sums = {"votes": update.delta_D.sign().sum(0), "weight": update.weight.sum(), "count": num}
        return merge_sums(acc, sums | {f"aux.{name}": rows.sum(0) for name, rows in update.aux.items()})

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        count = acc["count"]
        aux = {name.removeprefix("aux."): value / count for name, value in acc.items() if name.startswith("aux.")}
        return Aggregate(
            delta_D=acc["votes"].sign(), aux=aux, weight=float(acc["weight"]), num_clients=int(count)
        ), memory

    return Aggregator(add=add, merge=merge_sums, finish=finish, unit_steps=True, bounded=True)
