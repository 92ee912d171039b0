"""Clients' own models, each made when it is asked for: all of them together may not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from atoll.core.messages import KEPT, State
from atoll.core.params import load
from atoll.train.job import Job
from atoll.train.loop import BUFFER


@final
class OwnModels(Mapping[int, nn.Module]):
    """Client -> the model that it uses, from what all share and what it remembers.

    Where all share a model every client has one of its own, and otherwise those that have taken part.
    """

    def __init__(
        self, job: Job, makers: Sequence[Callable[[], nn.Module]], params_D: Tensor, memories: Mapping[int, State]
    ) -> None:
        self._job, self._makers, self._params_D, self._memories = job, makers, params_D, memories
        self._worker = job.work.open(job)

    def __getitem__(self, client: int) -> nn.Module:
        if client not in self._memories and client not in self._clients():
            raise KeyError(client)
        with torch.inference_mode(False), torch.enable_grad():  # a client's own model may need steps
            own = self._worker.own(self._params_D, self._memories.get(client, {}), client)
        make = self._job.work.own_model or _model
        return make(self._job, self._makers, client, *own).eval()

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients())

    def __len__(self) -> int:
        return len(self._clients())

    def _clients(self) -> Sequence[int]:
        return range(self._job.federation.added.start) if self._job.shares_model else sorted(self._memories)


def _model(
    job: Job, makers: Sequence[Callable[[], nn.Module]], client: int, params_D: Tensor, memory: State
) -> nn.Module:
    return loaded(job, makers[0](), params_D, memory)


def loaded(job: Job, model: nn.Module, params_D: Tensor, memory: State) -> nn.Module:
    """Return a model with a client's parameters, those that it keeps, and its own buffers."""
    model = load(model, job.spec, params_D, memory.get(KEPT, job.first_kept_K))
    with torch.no_grad():
        for name in job.local_buffers:
            if f"{BUFFER}{name}" in memory:
                model.get_buffer(name).copy_(memory[f"{BUFFER}{name}"])
    return model
