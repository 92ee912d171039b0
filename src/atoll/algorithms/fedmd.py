"""FedMD. Shapes: B samples, K classes."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, Scores, ServerTask
from atoll.core.messages import Aggregate, State
from atoll.core.options import Count, at_least

Epochs = Annotated[int, at_least(0)]

EXAMPLES = [{}, {"samples": 20, "public_epochs": 1}]


def fedmd(
    samples: Count = 1000, epochs: Epochs = 1, public_epochs: Epochs = 0, private_epochs: Epochs = 0
) -> Algorithm:
    """Clients keep models of their own and agree on class scores (Li and Wang 2019, arXiv:1910.03581, algorithm 1).

    In a round a client digests the mean scores of the round before on at most `samples` public samples, `epochs` times;
    revisits its own data as `local` says; and sends its scores, before the softmax, for the next samples. It follows
    the mean by the absolute difference, as the authors' code does. Before its first round it may pass `public_epochs`
    times over labelled public samples; `private_epochs` then takes the place of the first revisit.
    """

    def loss(scores_BK: Tensor, consensus_BK: Tensor) -> Tensor:
        return (scores_BK - consensus_BK).abs().flatten(1).mean(1)

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return aggregate.delta_D, server

    return Algorithm(
        server_step=server_step,
        needs_public=True,
        scores=Scores(samples, loss, epochs, public_epochs, private_epochs),
    )
