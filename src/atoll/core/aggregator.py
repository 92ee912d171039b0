"""Aggregator: a monoid over updates, so that workers fold their own clients and memory does not grow with the cohort.

Shapes: C clients, D parameters. Accumulators are named tensors, so that they can be sent to a process or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import STATISTICS, Aggregate, State, Update


def no_state() -> State:
    """Return an empty memory, for rules that keep nothing between rounds."""
    return {}


def empty() -> State:
    """Return the accumulator of no clients."""
    return {}


class Aggregator(NamedTuple):
    """A rule that combines updates: `finish(merge(add(zero(), some), add(zero(), others)))`."""

    add: Callable[[State, Update], State]
    """(accumulator, stacked update) -> accumulator."""
    merge: Callable[[State, State], State]
    """(accumulator, accumulator of other clients) -> accumulator of both."""
    finish: Callable[[State, State], tuple[Aggregate, State]]
    """(accumulator, memory) -> (aggregate, memory)."""
    zero: Callable[[], State] = empty
    """() -> accumulator of no clients."""
    init: Callable[[], State] = no_state
    """() -> memory before the first round."""
    needs_individuals: bool = False
    """Whether it needs each single update: its memory then grows with the cohort, and secure sums are refused."""
    min_updates: int = 1
    """Minimum number of valid updates; with fewer, the attempt is abandoned."""
    needs: str = ""
    """Reason for `min_updates` in error messages, such as "krum with f = 3 needs at least 2f + 3 = 9 updates"."""
    add_server_update: Callable[[State, Update], State] | None = None
    """(accumulator, server's own update) -> accumulator; unless None, the server trains on `server.samples`."""
    unit_steps: bool = False
    """Whether the norm of its result carries no information, so that a plan must set server.lr."""
    rotation_equivariant: bool = False
    """Whether rotating all updates rotates the result: it uses norms and angles only, and remembers no vector."""
    translation_equivariant: bool = False
    """Whether adding one vector to all updates adds it to the result."""
    weighted: bool = False
    """Whether the weights of clients change the result; other rules ignore them."""
    order_sensitive: bool = False
    """Whether the order of clients changes the result, as with random groups."""
    bounded: bool = False
    """Whether a single update, of any norm, changes the result by a bounded amount."""


class Traits(TypedDict, total=False):
    """Traits of a rule, as keywords; the fields of `Aggregator` describe them."""

    rotation_equivariant: bool
    translation_equivariant: bool
    weighted: bool
    order_sensitive: bool
    bounded: bool


Rule = Callable[[Tensor, Tensor], Tensor]
"""(updates_CD, weight_C) -> one row (D,)."""
RuleWithMemory = Callable[[Tensor, Tensor | None], Tensor]
"""(updates_CD, last result or None) -> one row (D,)."""
Preprocess = Callable[[Tensor, int], Tensor]
"""(updates_CD, number of earlier rounds) -> rows (M, D) for another rule."""


def as_rows(update: Update) -> State:
    """Return a stacked update as an accumulator that keeps every row."""
    return {"delta": update.delta_D, "weight": update.weight, **{f"aux.{k}": v for k, v in update.aux.items()}}


def rows_of(acc: State) -> Update:
    """Return the stacked update of an accumulator that keeps every row: the inverse of `as_rows`."""
    aux = {name.removeprefix("aux."): rows for name, rows in acc.items() if name.startswith("aux.")}
    return Update(acc["delta"], acc["weight"], aux)


def concatenate_rows(accumulators: list[State]) -> State:
    """Concatenate accumulators that keep every row, in this order, with one copy."""
    filled = [acc for acc in accumulators if acc]
    if len(filled) < 2:
        return filled[0] if filled else {}
    return {name: torch.cat([acc[name] for acc in filled]) for name in filled[0]}


def merge_rows(left: State, right: State) -> State:
    """Concatenate two accumulators that keep every row; for more of them, `concatenate_rows` copies less."""
    return concatenate_rows([left, right])


def merge_sums(left: State, right: State) -> State:
    """Add two accumulators of sums, name by name; an empty `left` is the neutral element."""
    return {name: left[name] + right[name] for name in left} if left else right


def _add(acc: State, update: Update) -> State:
    return merge_rows(acc, as_rows(update))


def keep_rows(
    finish: Callable[[State, State], tuple[Aggregate, State]], *, min_updates: int, needs: str, **traits: Unpack[Traits]
) -> Aggregator:
    """Make an aggregator that keeps every row until `finish`, which gets at least `min_updates` of them."""

    def checked(acc: State, memory: State) -> tuple[Aggregate, State]:
        num = len(acc["weight"]) if acc else 0
        if num < min_updates:
            raise PlanError(f"{needs}: got {num}; lower f, or ask more clients")
        return finish(acc, memory)

    needs = needs or f"the aggregator needs at least {min_updates} updates"
    return Aggregator(
        add=_add,
        merge=merge_rows,
        finish=checked,
        needs_individuals=True,
        min_updates=min_updates,
        needs=needs,
        **traits,
    )


def over_vectors(acc: State, rule: Callable[[str, Tensor], Tensor]) -> Aggregate:
    """Apply a rule, which gets a name and a matrix, to the update and to each extra vector separately.

    Statistics are reduced by their coordinate-wise median, because a rule that scales vectors would falsify them.
    """

    def reduced(name: str) -> Tensor:
        rows = acc[name]
        if name == f"aux.{STATISTICS}":
            sorted_CS = rows.sort(dim=0).values
            return (sorted_CS[(len(rows) - 1) // 2] + sorted_CS[len(rows) // 2]) / 2
        return rule(name, rows.reshape(len(rows), -1)).view(rows.shape[1:])

    aux = {name.removeprefix("aux."): reduced(name) for name in acc if name.startswith("aux.")}
    return Aggregate(
        delta_D=reduced("delta"), aux=aux, weight=float(acc["weight"].sum()), num_clients=len(acc["weight"])
    )


def stacked(rule: Rule, *, min_updates: int = 1, needs: str = "", **traits: Unpack[Traits]) -> Aggregator:
    """Make an aggregator of a function of the (C, D) matrix, applied to the update and each extra vector separately."""

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        return over_vectors(acc, lambda name, rows_CD: rule(rows_CD, acc["weight"])), memory

    return keep_rows(finish, min_updates=min_updates, needs=needs, **traits)


def stacked_with_memory(
    rule: RuleWithMemory, *, min_updates: int = 1, needs: str = "", **traits: Unpack[Traits]
) -> Aggregator:
    """Make an aggregator of a function of the (C, D) matrix and of its result in the previous round."""

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        result = over_vectors(acc, lambda name, rows_CD: rule(rows_CD, _flat(memory.get(name))))
        return result, {"delta": result.delta_D, **{f"aux.{name}": value for name, value in result.aux.items()}}

    return keep_rows(finish, min_updates=min_updates, needs=needs, **traits)


def _flat(last: Tensor | None) -> Tensor | None:
    return None if last is None else last.reshape(-1)


def preprocessed(preprocess: Preprocess, inner: Aggregator, *, min_updates: int, needs: str) -> Aggregator:
    """Make an aggregator that applies another rule to preprocessed rows, all with the same weight.

    It counts its rounds, so that `preprocess` may draw new random numbers in each. The rows must be means of updates,
    chosen by their distances or at random: the whole is then rotation equivariant if the other rule is.
    """
    if inner.add_server_update is not None:
        raise PlanError(
            "a rule that compares with the server's own update cannot be wrapped in another: use it as the aggregator"
        )

    def init() -> State:
        return {"round": torch.tensor(0), **{f"rule.{name}": value for name, value in inner.init().items()}}

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        round_number = int(memory["round"])
        changed = {
            name: preprocess(rows.reshape(len(rows), -1), round_number).view(-1, *rows.shape[1:])
            for name, rows in acc.items()
            if name != "weight"
        }
        changed["weight"] = acc["weight"].new_ones(len(changed["delta"]))
        inner_memory = {name.removeprefix("rule."): value for name, value in memory.items() if name.startswith("rule.")}
        result, inner_memory = inner.finish(inner.add(inner.zero(), rows_of(changed)), inner_memory)
        result = result._replace(weight=float(acc["weight"].sum()), num_clients=len(acc["weight"]))
        new_memory = {f"rule.{name}": value for name, value in inner_memory.items()}
        return result, {"round": torch.tensor(round_number + 1), **new_memory}

    return keep_rows(finish, min_updates=min_updates, needs=needs)._replace(
        init=init,
        unit_steps=inner.unit_steps,
        rotation_equivariant=inner.rotation_equivariant,
        translation_equivariant=inner.translation_equivariant,
        order_sensitive=inner.order_sensitive,
        bounded=inner.bounded,
    )
