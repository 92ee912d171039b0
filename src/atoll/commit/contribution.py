"""What each client of a round added to the model: coalitions, and what the plan's own server makes of them.

Shapes: C clients, D parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.commit.server_step import aggregated, stepped
from atoll.core.aggregator import as_rows
from atoll.core.contribution import Coalition, Contribution, Game
from atoll.core.messages import State, Update
from atoll.core.seeds import generator
from atoll.train.job import Job

WORST = 1e6
"""A loss above this, or one that is no number, counts as this: one exploded model must not turn all sums into NaN."""


class Before(NamedTuple):
    """What a commit starts from, and a coalition's imagined commit with it."""

    params_D: Tensor
    server: State
    rule: State
    own: Update | None
    """The server's own update, where the rule compares with it."""
    version: int
    num_clients: int
    """How many are registered."""


class Shares(NamedTuple):
    """How a round's gain is shared out."""

    clients: dict[int, float]
    evaluations: int
    """How many models were measured for it."""


def shares_of(
    job: Job,
    how: Contribution,
    before: Before,
    clients: Sequence[int],
    updates: Update,
    scores: Callable[[Tensor], tuple[float, float]],
) -> Shares:
    """Share out a round's gain to its clients, whose updates come as rows in the same order.

    `scores` gives accuracy and loss on the server's own samples. Clients take their places by number, so that the order
    in which they were trained does not matter.
    """
    places = np.argsort(clients)
    known: dict[Coalition, float] = {}

    def value(some: Coalition) -> float:
        if some not in known:
            keep_C = torch.zeros(len(clients), dtype=torch.bool)
            keep_C[places[sorted(some)]] = True
            known[some] = _worth(how, scores(coalition_model(job, before, updates.rows(keep_C))))
        return known[some]

    found_C = how.values(Game(len(clients), value), generator(job.seed, "contribution", before.version)).tolist()
    by_client = {clients[place]: share for place, share in zip(places.tolist(), found_C, strict=True)}
    return Shares(by_client, len(known))


def coalition_model(job: Job, before: Before, updates: Update) -> Tensor:
    """The model that the plan's rule and server's step make of these updates alone.

    Updates that are too few for the rule, or have no weight in a rule that weighs, make no version: the model stays as
    it was.
    """
    if len(updates.weight) < max(1, job.aggregator.min_updates):
        return before.params_D
    aggregate, _ = aggregated(job, as_rows(updates), before.rule, before.own)
    if aggregate.weight == 0 and not bool(aggregate.delta_D.isfinite().all()):
        return before.params_D
    return stepped(job, before.params_D, aggregate, before.server, before.version, before.num_clients)[0]


def _worth(how: Contribution, scores: tuple[float, float]) -> float:
    accuracy, loss = scores
    if how.utility == "accuracy":
        return accuracy
    return -min(loss, WORST) if math.isfinite(loss) else -WORST


def with_shares(totals: Mapping[int, float], shares: Shares) -> dict[int, float]:
    """The totals over the rounds so far, with one more."""
    return {**totals, **{client: totals.get(client, 0.0) + share for client, share in shares.clients.items()}}
