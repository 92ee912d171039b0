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
"""Number of public samples in one forward pass of a client's model: bounds the memory of activations."""

EXAMPLE = {"steps": 3, "batch_size": 16}
SMOOTH = {"lr": 1e-6}


def feddf(
    steps: Annotated[int, at_least(1, "without distillation it is fedavg")] = 100,
    batch_size: Count = 128,
    lr: Positive = 1e-3,
    temperature: Positive = 1.0,
) -> Algorithm:
    """Distil the clients' models into their average on unlabelled public samples (Lin et al. 2020, arXiv:2006.07242).

    Algorithm 1: the average is the student, trained by `steps` steps of Adam on T^2 KL(softmax(mean of the clients'
    logits / T) || softmax(student's logits / T)) with a cosine schedule that lowers lr to 0. The paper takes T = 1 and
    up to 10,000 steps.
    """

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        assert aggregate.updates is not None and task.public is not None
        batches_SB = _batches(task.public.num_samples, steps, batch_size, task.rng)
        used_N, position_SB = np.unique(batches_SB, return_inverse=True)
        teacher_NK = _ensemble(params_D, aggregate.updates, used_N, task.public, task) / temperature
        student_D = (params_D + task.lr * aggregate.delta_D).requires_grad_()
        optimizer = torch.optim.Adam([student_D])
        for step, position_B in enumerate(torch.from_numpy(position_SB.reshape(batches_SB.shape))):
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            logits_BK = task.outputs(student_D, task.public.features(batches_SB[step])) / temperature
            loss = temperature**2 * _divergence(teacher_NK[position_B], logits_BK)
            student_D.grad = torch.autograd.grad(loss, student_D)[0]
            optimizer.step()
        return student_D.detach(), server

    return Algorithm(server_step=server_step, needs_updates=True, needs_public=True)


def _batches(num_samples: int, steps: int, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return (S, B) indices: random permutations of all samples, one after another, cut into batches."""
    size = min(batch_size, num_samples)
    passes = [rng.permutation(num_samples) for _ in range(-(-steps * size // num_samples))]
    return np.concatenate(passes)[: steps * size].reshape(steps, size)


def _ensemble(params_D: Tensor, updates: Update, used_N: np.ndarray, public: PublicSamples, task: ServerTask) -> Tensor:
    """Return the mean logits of the clients' models on each of the samples that will be used, (N, K)."""
    slices = []
    clients_CD = params_D + updates.delta_D
    changes = updates.aux.get(STATISTICS, [None] * len(clients_CD))
    with torch.no_grad():
        for start in range(0, len(used_N), SLICE):
            x = public.features(used_N[start : start + SLICE])
            pairs = zip(clients_CD, changes, strict=True)
            slices.append(torch.stack([task.outputs(client_D, x, change_S) for client_D, change_S in pairs]).mean(0))
    return torch.cat(slices)


def _divergence(teacher_BK: Tensor, student_BK: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) of logits, averaged over samples."""
    teacher, student = teacher_BK.log_softmax(-1), student_BK.log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()
