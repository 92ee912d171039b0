"""Client work from plain functions: arrays in, arrays out. Nothing in them needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from atoll.core.client_work import ClientWork, Samples, Sums, Trained, Worker
from atoll.core.errors import AtollError, TrainingError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.seeds import generator
from atoll.train.batches import client_batches
from atoll.train.job import Job

Arrays = dict[str, np.ndarray]


class ArrayTask(NamedTuple):
    """What a client's function works with: its samples, and what the plan says of this task."""

    x: np.ndarray
    y: np.ndarray
    client: int
    """Its number; -1 for the server's own samples."""
    round: int
    """The version that the arrays are of, 0 at first."""
    lr: float
    """The learning rate of the plan for this round."""
    rng: np.random.Generator
    """Draws that are the same however often and wherever the task is done."""
    batches: Callable[[], list[np.ndarray]]
    """Gives the batches that the local loop would take, as positions in `x`."""


Result = tuple[Mapping[str, Any], int, Mapping[str, float]]
Train = Callable[[Arrays, ArrayTask, Arrays], Result]
"""(arrays, task, memory) -> (new arrays, number of samples, metrics): what the client changes in `memory` it remembers,
and `loss` among the metrics is its training loss."""
Evaluate = Callable[[Arrays, ArrayTask], Mapping[str, float]]
"""(arrays, task) -> sums over the samples: of `loss`, and of `right` answers if there are such."""


def array_work(*, first: Callable[[Any], Mapping[str, Any]], train: Train, evaluate: Evaluate) -> ClientWork:
    """Make client work of three functions, for any loop: NumPy, scikit-learn, JAX, one's own in PyTorch.

    `first(dataset)` gives the named arrays that the run starts from; see `Train` and `Evaluate` for the others.
    """
    return ClientWork(open=lambda job: ArrayWorker(job, train, evaluate), first=first)


@final
class ArrayWorker(Worker):
    """Hands clients' arrays to plain functions, and takes what they return apart."""

    def __init__(self, job: Job, train: Train, evaluate: Evaluate) -> None:
        self.job, self._train, self._evaluate = job, train, evaluate

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Call the client's function, and send by how much its arrays differ from those that were sent."""
        remembered = {name: value.numpy().copy() for name, value in memory.items()}
        asked = self._task(samples, task.version, task)
        returned = self._train(self._arrays(sent.params_D), asked, remembered)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise self._wrong(f"returned {type(returned).__name__}: return (arrays, number of samples, metrics)")
        arrays, num_samples, metrics = returned
        if not isinstance(num_samples, int | np.integer) or num_samples < 1:
            raise self._wrong(f"returned {num_samples!r} samples: return a whole number of at least 1")
        delta_D = self._flat(arrays) - sent.params_D
        weight = torch.tensor(float(num_samples), dtype=self.job.spec.dtype)
        kept = {name: torch.as_tensor(np.array(value)) for name, value in remembered.items()}
        return Trained(Update(delta_D, weight, {}), kept, float(metrics.get("loss", float("nan"))))

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Call the function that measures the arrays."""
        sums = self._evaluate(self._arrays(params_D), self._task(samples, 0, None))
        named = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()}
        return {"count": torch.tensor(samples.num_samples), **named}

    def _task(self, samples: Samples, version: int, task: Task | None) -> ArrayTask:
        x, y = samples.load()
        path = (version, samples.client + 1) if task is None else (task.attempt, task.client + 1)
        return ArrayTask(
            x=x.numpy(),
            y=y.numpy(),
            client=samples.client,
            round=version,
            lr=self.job.lr_of(version),
            rng=generator(self.job.seed, "client's function", *path),
            batches=lambda: [] if task is None else self._batches(task),
        )

    def _batches(self, task: Task) -> list[np.ndarray]:
        indices = self.job.federation.train_indices(task.client)
        order = np.argsort(indices, kind="stable")
        return [order[np.searchsorted(indices, batch, sorter=order)] for batch in client_batches(self.job, task)]

    def _arrays(self, params_D: Tensor) -> Arrays:
        return {name: view.numpy().copy() for name, view in self.job.spec.views(params_D).items()}

    def _flat(self, arrays: Any) -> Tensor:
        """Join arrays into the vector that travels; others than were sent are refused."""
        if not isinstance(arrays, Mapping):
            raise self._wrong(f"returned {type(arrays).__name__} as arrays: return named arrays")
        slots, dtype = self.job.spec.slots, self.job.spec.dtype
        expected, shapes = {slot.name: slot.shape for slot in slots}, {k: np.shape(v) for k, v in arrays.items()}
        if shapes != expected:
            raise self._wrong(
                f"returned arrays of shapes {shapes}, but {expected} were sent: return the same names and shapes"
            )
        parts = []
        for slot in slots:
            values = np.asarray(arrays[slot.name])
            if values.dtype.kind not in "fiub":
                raise self._wrong(f"returned '{slot.name}' as {values.dtype}: return numbers")
            part = torch.as_tensor(np.array(values)).to(dtype).reshape(-1)
            if not bool(part.isfinite().all()):
                raise self._wrong(f"returned NaN or Inf in '{slot.name}': lower the learning rate, or check the data")
            parts.append(part)
        return torch.cat(parts)

    def _wrong(self, what: str) -> AtollError:
        """Return an error that names the client's function and its line."""
        function = inspect.unwrap(self._train)
        name = getattr(function, "__qualname__", repr(function))
        code = getattr(function, "__code__", None)
        where = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
        return TrainingError(f"the client's function {name}{where} {what}")
