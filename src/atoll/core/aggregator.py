"""Aggregator: a monoid over updates, so that workers fold their own clients and memory does not grow with the cohort.

Shapes: C clients, D parameters. Accumulators are named tensors, so that they can cross a process or be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import STATISTICS, Aggregate, State, Update


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
    """Fewer valid updates than this are not aggregated: the attempt is abandoned."""
    needs: str = ""
    """Says why, such as "krum with f = 3 needs at least 2f + 3 = 9 updates"."""
    trust: Callable[[State, Update], State] | None = None
    """(accumulator, the server's own update) -> accumulator; where it is given, the server trains on own samples."""
    unit_steps: bool = False
    """Whether what it gives has no size of its own, so that a plan must say server.lr."""
    rotation_equivariant: bool = False
    """Whether it goes by lengths and angles alone and remembers no vector: turn all updates, and the result turns."""
    translation_equivariant: bool = False
    """Whether adding one vector to all updates adds it to the result."""
    weighted: bool = False
    """Whether clients count by their weights. A rule that does not say so ignores them."""
    order_sensitive: bool = False
    """Whether the order of clients matters, as it does where they are dealt out to random groups."""
    bounded: bool = False
    """Whether one update, however large, moves the result by a bounded amount."""


class Traits(TypedDict, total=False):
    """What a rule may say of itself; see the fields of `Aggregator`."""

    rotation_equivariant: bool
    translation_equivariant: bool
    weighted: bool
    order_sensitive: bool
    bounded: bool


Rule = Callable[[Tensor, Tensor], Tensor]
"""(updates_CD, weight_C) -> one row (D,)."""
RecallingRule = Callable[[Tensor, Tensor | None], Tensor]
"""(updates_CD, what it gave last time or None) -> one row (D,)."""
Step = Callable[[Tensor, int], Tensor]
"""(updates_CD, rounds so far) -> rows (M, D) for another rule."""


def as_rows(update: Update) -> State:
    """A stacked update as an accumulator that keeps every row."""
    return {"delta": update.delta_D, "weight": update.weight, **{f"aux.{k}": v for k, v in update.aux.items()}}


def rows_of(acc: State) -> Update:
    """Undo `as_rows`."""
    aux = {name.removeprefix("aux."): rows for name, rows in acc.items() if name.startswith("aux.")}
    return Update(acc["delta"], acc["weight"], aux)


def joined(accumulators: list[State]) -> State:
    """All rows of accumulators that keep them, in this order and copied once."""
    some = [acc for acc in accumulators if acc]
    if len(some) < 2:
        return some[0] if some else {}
    return {name: torch.cat([acc[name] for acc in some]) for name in some[0]}


def merge_rows(left: State, right: State) -> State:
    """The rows of two accumulators that keep them; many are better `joined` at once."""
    return joined([left, right])


def _add(acc: State, update: Update) -> State:
    return merge_rows(acc, as_rows(update))


def individuals(
    finish: Callable[[State, State], tuple[Aggregate, State]], *, min_updates: int, needs: str, **traits: Unpack[Traits]
) -> Aggregator:
    """An aggregator that keeps every row until `finish`, which gets at least `min_updates` of them."""

    def checked(acc: State, memory: State) -> tuple[Aggregate, State]:
        num = len(acc["weight"]) if acc else 0
        if num < min_updates:
            raise PlanError(f"{needs}: got {num}; lower f, or ask more clients")
        return finish(acc, memory)

    needs = needs or f"the aggregator needs at least {min_updates} updates"
    return Aggregator(_add, merge_rows, checked, needs_individuals=True, min_updates=min_updates, needs=needs, **traits)


def over_vectors(acc: State, rule: Callable[[str, Tensor], Tensor]) -> Aggregate:
    """Apply a rule, which gets a name and a matrix, to the update and to each extra vector, one by one.

    Statistics get their coordinate-wise median: it is one of statistics whatever the rule does to lengths.
    """

    def one(name: str) -> Tensor:
        rows = acc[name]
        if name == f"aux.{STATISTICS}":
            ordered_CS = rows.sort(dim=0).values
            return (ordered_CS[(len(rows) - 1) // 2] + ordered_CS[len(rows) // 2]) / 2
        return rule(name, rows.reshape(len(rows), -1)).view(rows.shape[1:])

    aux = {name.removeprefix("aux."): one(name) for name in acc if name.startswith("aux.")}
    return Aggregate(one("delta"), aux, float(acc["weight"].sum()), len(acc["weight"]))


def stacked(rule: Rule, *, min_updates: int = 1, needs: str = "", **traits: Unpack[Traits]) -> Aggregator:
    """Lift a function of the (C, D) matrix into an aggregator; extra vectors go through the same rule, one by one."""

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        return over_vectors(acc, lambda name, rows_CD: rule(rows_CD, acc["weight"])), memory

    return individuals(finish, min_updates=min_updates, needs=needs, **traits)


def recalling(rule: RecallingRule, *, min_updates: int = 1, needs: str = "", **traits: Unpack[Traits]) -> Aggregator:
    """Lift a function of the (C, D) matrix and of what it gave in the round before."""

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        found = over_vectors(acc, lambda name, rows_CD: rule(rows_CD, _flat(memory.get(name))))
        return found, {"delta": found.delta_D, **{f"aux.{name}": value for name, value in found.aux.items()}}

    return individuals(finish, min_updates=min_updates, needs=needs, **traits)


def _flat(last: Tensor | None) -> Tensor | None:
    return None if last is None else last.reshape(-1)


def prepared(step: Step, inner: Aggregator, *, min_updates: int, needs: str) -> Aggregator:
    """An aggregator that changes the rows by `step` before another rule sees them, all with one weight.

    It counts its rounds, so that a step may draw new random numbers in each. Steps take means of rows, chosen by their
    distances or at random, so that the whole turns with the updates if the other rule does.
    """
    if inner.trust is not None:
        raise PlanError("a rule that compares with the server's own update cannot be wrapped: use it as the aggregator")

    def init() -> State:
        return {"round": torch.tensor(0), **{f"rule.{name}": value for name, value in inner.init().items()}}

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        number = int(memory["round"])
        changed = {
            name: step(rows.reshape(len(rows), -1), number).view(-1, *rows.shape[1:])
            for name, rows in acc.items()
            if name != "weight"
        }
        changed["weight"] = acc["weight"].new_ones(len(changed["delta"]))
        kept = {name.removeprefix("rule."): value for name, value in memory.items() if name.startswith("rule.")}
        found, kept = inner.finish(inner.add(inner.zero(), rows_of(changed)), kept)
        found = found._replace(weight=float(acc["weight"].sum()), num_clients=len(acc["weight"]))
        return found, {"round": torch.tensor(number + 1), **{f"rule.{name}": value for name, value in kept.items()}}

    return individuals(finish, min_updates=min_updates, needs=needs)._replace(
        init=init,
        unit_steps=inner.unit_steps,
        rotation_equivariant=inner.rotation_equivariant,
        translation_equivariant=inner.translation_equivariant,
        order_sensitive=inner.order_sensitive,
        bounded=inner.bounded,
    )
