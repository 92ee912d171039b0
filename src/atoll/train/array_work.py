"""Client work from plain functions: arrays in, arrays out. Nothing in them needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from atoll.core.client_work import ClientWork, Samples, Sums, Trained, Worker
from atoll.core.errors import TrainingError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.train.job import Job

Arrays = dict[str, np.ndarray]
NO_ARRAYS: Mapping[str, Any] = MappingProxyType({})


class Fitted(NamedTuple):
    """What a client's function made of the arrays that it was sent."""

    arrays: Mapping[str, Any]
    """The new values, of the same names and shapes."""
    num_samples: int
    """The weight of this client in the mean."""
    loss: float = float("nan")
    """Mean training loss; NaN if there is none."""
    memory: Mapping[str, Any] = NO_ARRAYS
    """What the client remembers for its next task; it is never sent."""


def array_work(
    *,
    first: Callable[[Any], Mapping[str, Any]],
    train: Callable[[Arrays, np.ndarray, np.ndarray, Arrays], Fitted],
    evaluate: Callable[[Arrays, np.ndarray, np.ndarray], Mapping[str, float]],
) -> ClientWork:
    """Make client work of three functions, for any loop: NumPy, scikit-learn, JAX or none.

    `first(dataset)` gives the named arrays that the run starts from, `train(arrays, x, y, memory)` a client's new ones,
    and `evaluate(arrays, x, y)` named sums over the samples: `loss`, and `right` if there are right answers.
    """
    return ClientWork(open=lambda job: ArrayWorker(job, train, evaluate), first=first)


@final
class ArrayWorker(Worker):
    """Hands clients' arrays to plain functions, and takes what they return apart."""

    def __init__(
        self,
        job: Job,
        train: Callable[[Arrays, np.ndarray, np.ndarray, Arrays], Fitted],
        evaluate: Callable[[Arrays, np.ndarray, np.ndarray], Mapping[str, float]],
    ) -> None:
        self.job, self._train, self._evaluate = job, train, evaluate

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Call the client's function, and send by how much its arrays differ from those that were sent."""
        x, y = samples.load()
        remembered = {name: value.numpy().copy() for name, value in memory.items()}
        fitted = self._train(self._arrays(sent.params_D), x.numpy(), y.numpy(), remembered)
        delta_D = self._flat(fitted.arrays) - sent.params_D
        weight = torch.tensor(float(fitted.num_samples), dtype=self.job.spec.dtype)
        kept = {name: torch.as_tensor(np.array(value)) for name, value in fitted.memory.items()}
        return Trained(Update(delta_D, weight, {}), kept, float(fitted.loss))

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Call the function that measures the arrays."""
        x, y = samples.load()
        sums = self._evaluate(self._arrays(params_D), x.numpy(), y.numpy())
        named = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()}
        return {"count": torch.tensor(samples.num_samples), **named}

    def _arrays(self, params_D: Tensor) -> Arrays:
        return {name: view.numpy().copy() for name, view in self.job.spec.views(params_D).items()}

    def _flat(self, arrays: Mapping[str, Any]) -> Tensor:
        """Join arrays into the vector that travels; others than were sent are refused."""
        slots = self.job.spec.slots
        expected, shapes = {slot.name: slot.shape for slot in slots}, {k: np.shape(v) for k, v in arrays.items()}
        if shapes != expected:
            raise TrainingError(
                f"the client's function returned arrays of shapes {shapes}, but {expected} were sent: return the same "
                "names and shapes"
            )
        dtype = self.job.spec.dtype
        return torch.cat([torch.as_tensor(np.array(arrays[slot.name])).to(dtype).reshape(-1) for slot in slots])
