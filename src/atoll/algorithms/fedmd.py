"""FedMD. Shapes: D scores."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.messages import Aggregate, State
from atoll.core.options import Count, at_least
from atoll.core.parts import Part

Epochs = Annotated[int, at_least(0)]

EXAMPLES = [{}, {"samples": 20, "public_epochs": 1}]


def fedmd(
    samples: Count = 1000, epochs: Epochs = 1, public_epochs: Epochs = 0, private_epochs: Epochs = 0
) -> Algorithm:
    """Let clients train models of their own towards common class scores (Li and Wang 2019, arXiv:1910.03581).

    Algorithm 1: in each round a client trains for `epochs` epochs on the mean scores of the previous round for at most
    `samples` public samples (digest); trains on its own data as `local` says (revisit); and sends its scores, before
    the softmax, for the next public samples. The digest loss is the absolute difference, as in the authors' code.
    Before its first round a client trains for `public_epochs` epochs on labelled public samples; `private_epochs` then
    replaces the number of epochs of the first revisit.
    """

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return aggregate.delta_D, server

    return Algorithm(
        server_step=server_step,
        needs_public=True,
        work=Part(
            "consensus", samples=samples, epochs=epochs, public_epochs=public_epochs, private_epochs=private_epochs
        ),
    )
