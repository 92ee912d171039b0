"""Client works that Atoll does not ship: plain functions without a model, and a client that remembers much."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.client_work import ClientWork
from atoll.train.array_work import Arrays, ArrayTask, Result, array_work

REMEMBERED = 2000
"""Numbers that a client of `remembering` keeps for itself."""


def centroids() -> ClientWork:
    """Learn the mean features of each class: nothing is trained, and nobody needs torch."""

    def first(dataset: Any) -> Arrays:
        size = int(np.prod(dataset.input_shape))
        return {"sums": np.zeros((dataset.num_classes, size)), "counts": np.full(dataset.num_classes, 1e-3)}

    def train(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Result:
        x, y = task.x, task.y
        flat = x.reshape(len(x), -1)
        labels = np.arange(len(arrays["counts"]))
        sums = np.stack([flat[y == label].sum(0) for label in labels]) / len(x)
        return {"sums": sums, "counts": (y[:, None] == labels).mean(0)}, len(x), {}

    return array_work(first=first, train=train, evaluate=nearest)


def nearest(arrays: Arrays, task: ArrayTask) -> dict[str, float]:
    x, y = task.x, task.y
    centres = arrays["sums"] / np.maximum(arrays["counts"], 1e-3)[:, None]
    distances = ((x.reshape(len(x), 1, -1) - centres) ** 2).sum(2)
    return {"right": float((distances.argmin(1) == y).sum()), "loss": float(distances.min(1).sum())}


def remembering() -> ClientWork:
    """Send one number, the mean of what was remembered, and remember many more."""

    def first(dataset: Any) -> Arrays:
        return {"mean": np.zeros(1)}

    def train(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Result:
        before = memory.get("seen", np.zeros(REMEMBERED, dtype=np.float32))
        memory["seen"] = seen = before + np.float32(arrays["mean"][0] + task.x.mean())
        return {"mean": seen[:1] * 0.5}, len(task.x), {"loss": float(seen[0])}

    def evaluate(arrays: Arrays, task: ArrayTask) -> dict[str, float]:
        return {"loss": float(np.abs(task.x.mean() - arrays["mean"]).sum()) * len(task.x)}

    return array_work(first=first, train=train, evaluate=evaluate)
