"""Which samples a client sees at which step. Shapes: S steps, G clients, B samples a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from atoll.core.messages import Task
from atoll.core.seeds import generator
from atoll.train.job import Job
from atoll.train.private import poisson_batches


def client_batches(job: Job, task: Task) -> list[np.ndarray]:
    """Index lists, one a step: each epoch is a fresh permutation cut into batches, the last of them short.

    With batch size "all" a step is every sample, in order. Where steps are private, batches are drawn by coins instead.
    """
    if job.private is not None:
        return poisson_batches(job, task)
    indices = job.federation.train_indices(task.client)
    steps = job.num_steps(task.client, task.work)
    if job.local.batch_size == "all":
        return [indices] * steps
    size = min(job.batch_size, len(indices))
    rng = generator(job.seed, "batches", task.attempt, task.client)
    batches: list[np.ndarray] = []
    while len(batches) < steps:
        order = rng.permutation(indices)
        batches.extend(order[start : start + size] for start in range(0, len(order), size))
    return batches[:steps]


class Stacked(NamedTuple):
    """The batches of several clients, padded to one shape; `live` is 0 for a client that has finished."""

    index_SGB: np.ndarray
    weight_SGB: np.ndarray
    """A sample's share in the mean of its batch; 0 for padding."""
    live_SG: np.ndarray


def stacked_batches(per_client: list[list[np.ndarray]], width_of: Callable[[int], int], size: int) -> Stacked:
    """Lay the batches of up to `size` clients side by side; short batches, clients and stacks are padded and masked.

    `width_of` says how wide they are laid out if the longest has so many samples.
    """
    steps = max(len(batches) for batches in per_client)
    width = width_of(max(len(batch) for batches in per_client for batch in batches))
    index_SGB = np.zeros((steps, size, width), dtype=np.int64)
    weight_SGB = np.zeros((steps, size, width))
    live_SG = np.zeros((steps, size), dtype=np.float32)
    for g, batches in enumerate(per_client):
        live_SG[: len(batches), g] = 1
        sizes = np.array([len(batch) for batch in batches])
        filled = np.arange(width) < sizes[:, None]
        weight_SGB[: len(batches), g] = filled / np.maximum(sizes, 1)[:, None]
        index_SGB[: len(batches), g][filled] = np.concatenate(batches)
    return Stacked(index_SGB, weight_SGB, live_SG)


def round_up(number: int, parts: int) -> int:
    """The next number of the form m * 2^k with m in parts..2 parts: at most one in `parts` is padding.

    >>> [round_up(number, 4) for number in (0, 3, 9, 287)], round_up(287, 16)
    ([1, 3, 10, 320], 288)
    """
    unit: int = 1 << max(0, number.bit_length() - parts.bit_length())
    return max(1, -(-number // unit) * unit)
