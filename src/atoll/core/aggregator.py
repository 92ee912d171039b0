"""Aggregator: a monoid over updates, so that workers fold their own clients and memory does not grow with the cohort.

Shapes: C clients, D parameters. Accumulators are named tensors, so that they can cross a process or be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.messages import Aggregate, State, Update


def no_state() -> State:
    """Remember nothing from round to round."""
    return {}


def empty() -> State:
    """The accumulator of no client."""
    return {}


class Aggregator(NamedTuple):
    """How updates become one: `finish(merge(add(zero(), some), add(zero(), others)))`."""

    add: Callable[[State, Update], State]
    """(accumulator, stacked update) -> accumulator."""
    merge: Callable[[State, State], State]
    finish: Callable[[State, State], tuple[Aggregate, State]]
    """(accumulator, memory) -> (aggregate, memory)."""
    zero: Callable[[], State] = empty
    init: Callable[[], State] = no_state
    """What the rule remembers from round to round."""
    needs_individuals: bool = False
    """Whether it must see each update: then memory grows with the cohort, and it cannot sit behind a masked sum."""
    min_updates: int = 1
    unit_steps: bool = False
    """Whether what it gives has no size of its own, so that a plan must say server.lr."""


Rule = Callable[[Tensor, Tensor], Tensor]
"""(updates_CD, weight_C) -> one row (D,)."""


def as_rows(update: Update) -> State:
    """A stacked update as an accumulator that keeps every row."""
    return {"delta": update.delta_D, "weight": update.weight, **{f"aux.{k}": v for k, v in update.aux.items()}}


def rows_of(acc: State) -> Update:
    """Undo `as_rows`."""
    aux = {name.removeprefix("aux."): rows for name, rows in acc.items() if name.startswith("aux.")}
    return Update(acc["delta"], acc["weight"], aux)


def _concatenate(left: State, right: State) -> State:
    if not left:
        return right
    return {name: torch.cat([left[name], right[name]]) for name in left}


def stacked(rule: Rule, *, min_updates: int = 1) -> Aggregator:
    """Lift a function of the (C, D) matrix into an aggregator; extra vectors go through the same rule, one by one."""

    def add(acc: State, update: Update) -> State:
        return _concatenate(acc, as_rows(update))

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        weight_C = acc["weight"]
        aux = {name.removeprefix("aux."): rule(rows, weight_C) for name, rows in acc.items() if name.startswith("aux.")}
        delta_D = rule(acc["delta"], weight_C)
        return Aggregate(delta_D, aux, float(weight_C.sum()), weight_C.numel()), memory

    return Aggregator(add=add, merge=_concatenate, finish=finish, needs_individuals=True, min_updates=min_updates)
