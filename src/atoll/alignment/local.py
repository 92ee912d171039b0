"""All parties of an alignment in one process: what a simulation and `atoll align` on local files do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll.alignment.curve import Spread, in_order
from atoll.alignment.ids import MAX_IDS, Rule, read_ids
from atoll.alignment.machines import Aligned, Answerer, AnswererState, Asker
from atoll.alignment.messages import Terms


class Outcome(NamedTuple):
    """What came of an alignment, and what it took."""

    aligned: Mapping[str, Aligned]
    """Party -> its common rows; empty where only their number was wanted."""
    sizes: Mapping[str, int]
    """Party -> how many ids it has in common with the asking one."""
    num_bytes: int
    messages: int


def align(
    parties: Mapping[str, Sequence[str]],
    asker: str,
    *,
    rule: Rule = "folded",
    count_only: bool = False,
    secret: bytes = b"",
    max_ids: int = MAX_IDS,
    spread: Spread = in_order,
) -> Outcome:
    """Join the records of parties by their ids; each gets its rows in an order that is common to all."""
    ids = {name: read_ids(texts, rule, name, max_ids) for name, texts in parties.items()}
    terms = Terms(rule=rule, count_only=count_only)
    answerers = {
        name: Answerer(ids=each, asker=asker, terms=terms, secret=secret, max_ids=max_ids, spread=spread)
        for name, each in ids.items()
        if name != asker
    }
    asking = Asker(ids=ids[asker], others=tuple(answerers), terms=terms, secret=secret, max_ids=max_ids, spread=spread)
    state, sent = asking.begin()
    states, on_way = {name: AnswererState() for name in answerers}, deque(sent)
    num_bytes = messages = 0
    while on_way:
        name, data = on_way.popleft()
        num_bytes, messages = num_bytes + len(data), messages + 1
        states[name], answers = answerers[name].handle(states[name], data)
        for answer in answers:
            num_bytes, messages = num_bytes + len(answer), messages + 1
            state, more = asking.handle(state, name, answer)
            on_way.extend(more)
    assert state.is_done
    aligned = {} if state.aligned is None else {asker: state.aligned}
    aligned |= {name: each.aligned for name, each in states.items() if each.aligned is not None}
    return Outcome(aligned, state.sizes, num_bytes, messages)
