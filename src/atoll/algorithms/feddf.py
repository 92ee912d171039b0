"""FedDF. Shapes: D parameters, C clients, P public samples, N of them used, S steps, B samples a batch, K classes."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, PublicSamples, ServerTask
from atoll.core.messages import STATISTICS, Aggregate, State, Update
from atoll.core.options import Count, Positive, at_least

SLICE = 1000
"""Public samples that a client's model looks at together."""

EXAMPLE = {"steps": 3, "batch_size": 16}
SMOOTH = {"lr": 1e-6}


def feddf(
    steps: Annotated[int, at_least(1, "without distillation it is fedavg")] = 100,
    batch_size: Count = 128,
    lr: Positive = 1e-3,
    temperature: Positive = 1.0,
) -> Algorithm:
    """Distil the clients' models into their average on unlabelled public samples (Lin et al. 2020, arXiv:2006.07242).

    Algorithm 1: from the average on, `steps` steps of Adam on T^2 KL(softmax(mean of the clients' logits / T) ||
    softmax(own logits / T)), lr falling to 0 by a cosine. The paper takes T = 1 and up to 10,000 steps.
    """

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        assert aggregate.updates is not None and task.public is not None
        batches_SB = _batches(task.public.num_samples, steps, batch_size, task.rng)
        used_N, place_SB = np.unique(batches_SB, return_inverse=True)
        wanted_NK = _ensemble(params_D, aggregate.updates, used_N, task.public, task) / temperature
        student_D = (params_D + task.lr * aggregate.delta_D).requires_grad_()
        optimizer = torch.optim.Adam([student_D])
        for number, place_B in enumerate(torch.from_numpy(place_SB.reshape(batches_SB.shape))):
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * number / steps)) / 2
            scores_BK = task.outputs(student_D, task.public.features(batches_SB[number])) / temperature
            student_D.grad = torch.autograd.grad(
                temperature**2 * _divergence(wanted_NK[place_B], scores_BK), student_D
            )[0]
            optimizer.step()
        return student_D.detach(), server

    return Algorithm(server_step=server_step, needs_updates=True, needs_public=True)


def _batches(num_samples: int, steps: int, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """(S, B) indices: one permutation of the samples after another, cut into batches."""
    size = min(batch_size, num_samples)
    passes = [rng.permutation(num_samples) for _ in range(-(-steps * size // num_samples))]
    return np.concatenate(passes)[: steps * size].reshape(steps, size)


def _ensemble(params_D: Tensor, updates: Update, used_N: np.ndarray, public: PublicSamples, task: ServerTask) -> Tensor:
    """The mean logits of the clients' models on the samples that will be used, each of them once."""
    found = []
    clients_CD = params_D + updates.delta_D
    changes = updates.aux.get(STATISTICS, [None] * len(clients_CD))
    with torch.no_grad():
        for start in range(0, len(used_N), SLICE):
            x = public.features(used_N[start : start + SLICE])
            pairs = zip(clients_CD, changes, strict=True)
            found.append(torch.stack([task.outputs(client_D, x, change_S) for client_D, change_S in pairs]).mean(0))
    return torch.cat(found)


def _divergence(wanted_BK: Tensor, scores_BK: Tensor) -> Tensor:
    """KL(softmax(wanted) || softmax(scores)), the mean over samples."""
    wanted, own = wanted_BK.log_softmax(-1), scores_BK.log_softmax(-1)
    return (wanted.exp() * (wanted - own)).sum(-1).mean()
