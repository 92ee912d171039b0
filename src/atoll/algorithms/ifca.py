"""IFCA. Shapes: K clusters, D parameters of a model, so that K * D values travel."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, Expected, ServerTask
from atoll.core.messages import MEMBERS, Aggregate, State, Update
from atoll.core.options import Range
from atoll.core.parts import Part


def ifca(clusters: Annotated[int, Range(1, 1000)] = 2) -> Algorithm:
    """Train a model for each cluster of clients (Ghosh et al. 2020, arXiv:2006.04088, algorithm 1).

    A client gets all models, takes the one with the least loss on its training samples, and trains it. It sends zeros
    for the others and which one it took, so that means of both give each cluster's mean: sums in secret work, and
    nobody need know who is where. That costs `clusters` times the bytes of one model, both ways.
    """

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        share_K = aggregate.aux[MEMBERS].unsqueeze(1)
        delta_KD = aggregate.delta_D.view(clusters, -1)
        mean_KD = torch.where(share_K > 0, delta_KD / share_K, torch.zeros_like(delta_KD))
        return params_D + task.lr * mean_KD.view(-1), server

    def plausible(updates: Update, expected: Expected) -> Tensor:
        members_CK = updates.aux[MEMBERS]
        return (members_CK >= 0).all(1) & ((members_CK.sum(1) - 1).abs() < 1e-3)

    return Algorithm(server_step=server_step, plausible=plausible, work=Part("clusters", num=clusters))
