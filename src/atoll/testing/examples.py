"""Small parts that plans of examples and rules name, and that no catalogue has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from atoll.core.client_work import ClientWork
from atoll.train.array_work import Arrays, ArrayTask, Result, array_work


def mean_features() -> ClientWork:
    """Learn the mean of all features by functions on arrays, without a model."""

    def first(dataset: Any) -> Mapping[str, Any]:
        return {"mean": np.zeros(math.prod(dataset.input_shape))}

    def train(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Result:
        return {"mean": task.x.reshape(len(task.x), -1).mean(0)}, len(task.x), {}

    def evaluate(arrays: Arrays, task: ArrayTask) -> Mapping[str, float]:
        return {"loss": float(np.square(task.x.reshape(len(task.x), -1) - arrays["mean"]).sum())}

    return array_work(first=first, train=train, evaluate=evaluate)


def double_logistic(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a logistic model whose parameters are float64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes)).double()
