"""FedRep."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.options import Share


def fedrep(head: Share = 0.5) -> Algorithm:
    """Fit the client's own head, then the shared body (Collins et al. 2021, arXiv:2102.07078, algorithm 1).

    In the first floor(head * steps) steps of a task the kept parameters move alone, in the others the shared ones; with
    head = 0 both move in all steps, as in FedPer. Optimisers that count steps count those of the whole task.
    """

    def moves(task: LocalTask) -> tuple[Tensor, Tensor]:
        own = task.step <= torch.floor(head * task.num_steps)
        return ~own, own

    return Algorithm(keep=("head",), moves=moves if head else None)
