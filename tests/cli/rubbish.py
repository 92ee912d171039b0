"""Parts and plans that are wrong in every way that a user's may be; tests name them as cli.rubbish:NAME."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll import Dataset, Plan
from atoll.data.index import Partition, dealt


def raising_plan() -> Plan:
    raise KeyError("learning_rate")


def plan_with_arguments(rounds: int) -> Plan:
    return Plan(rounds=rounds)


def no_plan() -> Any:
    return {"rounds": 3}


def wrong_plan() -> Plan:
    return Plan(local={"lr": -1})


def _samples(x: Any, y: Any, num_classes: int = 2) -> Dataset:
    return Dataset(name="mine", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=num_classes)


def nan_in_data() -> Dataset:
    x = np.ones((20, 4), dtype=np.float32)
    x[13, 2] = np.nan
    return _samples(x, np.arange(20) % 2)


def labels_out_of_range() -> Dataset:
    return _samples(np.ones((20, 4), dtype=np.float32), np.arange(20) % 3)


def float_labels() -> Dataset:
    return _samples(np.ones((20, 4), dtype=np.float32), np.linspace(0, 1, 20))


def more_labels_than_samples() -> Dataset:
    return _samples(np.ones((20, 4), dtype=np.float32), np.arange(21) % 2)


def token_out_of_range() -> Dataset:
    """Shows only in the middle of training."""
    x = np.zeros((20, 3), dtype=np.int64)
    x[11] = 99
    y = np.arange(20) % 2
    return Dataset(name="mine", train_x=x, train_y=y, test_x=x[:4], test_y=y[:4], num_classes=2, tokens=True)


def no_file() -> Dataset:
    return _samples(np.load("nowhere.npy"), np.arange(20) % 2)


def an_empty_client(dataset: Dataset) -> Partition:
    return dealt(np.arange(dataset.num_train), np.array([0, 500, 500, dataset.num_train]))


def not_a_model() -> Any:
    return 3


def interrupted_model() -> nn.Module:
    """As if somebody pressed Ctrl-C while the model was made."""
    raise KeyboardInterrupt


def no_parameters() -> nn.Module:
    return nn.Flatten()


def misfit() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 10))


def three_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))


class _FailsInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("this model\ncannot be trained")
        return self.linear(x.flatten(1))


def fails_in_training() -> nn.Module:
    return _FailsInTraining()


class _AllNan(_FailsInTraining):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * torch.nan


def all_nan() -> nn.Module:
    return _AllNan()


def one_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def number_of_python(outputs: Tensor, targets: Tensor) -> float:
    return 1.0


def failing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs @ targets
