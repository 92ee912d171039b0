"""Engines whose workers are asked by bytes: requests, and the answers to them, whatever carries them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from atoll.core.messages import Broadcast, State, Task
from atoll.engine.base import Engine
from atoll.engine.pipes import grouped, joined
from atoll.train.exchange import Report, Work
from atoll.train.job import Job
from atoll.train.trainer import Trainer

Message = tuple[dict[str, Any], State]
"""A header of plain data, and named tensors."""


class Pooled(Engine):
    """An engine that shares groups of clients out to workers, which hold the broadcasts and fold what they train."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        super().__init__(job, trainer)
        self._kept: dict[int, Broadcast] = {}  # what the workers have been sent

    @abstractmethod
    def _tell(self, header: dict[str, Any], tensors: State) -> None:
        """Let every worker keep broadcasts, or look at a model that is going to be evaluated."""

    @abstractmethod
    def _farm(self, requests: Iterable[Message]) -> Iterator[Message]:
        """Share requests out; the answers come in the order of the requests."""

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Share groups out; what comes back is folded already."""
        needed = {task.version: sent[task.version] for group in groups for task in group}
        fresh = {version: each for version, each in needed.items() if self._kept.get(version) is not each}
        self._kept = {version: each for version, each in self._kept.items() if sent.get(version) is each} | fresh
        news = {str(version): {"params": each.params_D, **each.aux} for version, each in fresh.items()}
        self._tell({"do": "keep", "versions": list(self._kept)}, joined(news))
        requests = (
            (
                {"do": "train", "tasks": [list(task) for task in group]},
                joined({str(task.client): states[task.client] for task in group if task.client in states}),
            )
            for group in groups
        )
        for header, tensors in self._farm(requests):
            found = grouped(tensors)
            folded = found.pop("folded", {})
            reports = [read_report(each) for each in header["reports"]]
            yield Work(folded, reports, {int(client): state for client, state in found.items()})

    def slices(self, params_D: Tensor, starts: list[int]) -> Iterable[State]:
        """Share slices of the test set out."""
        self._tell({"do": "look at"}, {"params": params_D})
        for _, tensors in self._farm(({"do": "slice", "start": start}, {}) for start in starts):
            yield tensors

    def client_scores(
        self, params_D: Tensor, groups: list[list[int]], states: Mapping[int, State] | None
    ) -> Iterable[Tensor]:
        """Share groups of clients out."""
        self._tell({"do": "look at"}, {"params": params_D})
        known, own = states or {}, states is not None
        requests = (
            ({"do": "clients", "clients": group, "own": own}, joined({str(c): known[c] for c in group if c in known}))
            for group in groups
        )
        for _, tensors in self._farm(requests):
            yield tensors["scores"]

    def own_tests(self, params_D: Tensor, states: Mapping[int, State]) -> Iterable[State]:
        """Share clients out."""
        self._tell({"do": "look at"}, {"params": params_D})
        requests = (({"do": "own test", "client": client}, state) for client, state in states.items())
        for _, tensors in self._farm(requests):
            yield tensors

    def new_scores(self, sent: Broadcast, clients: Sequence[int], steps: Sequence[int]) -> Iterable[Tensor]:
        """Share clients out."""
        self._tell({"do": "look at"}, {"params": sent.params_D, **sent.aux})
        for _, tensors in self._farm(({"do": "new", "client": each, "steps": list(steps)}, {}) for each in clients):
            yield tensors["scores"]


def read_report(values: list[Any]) -> Report:
    """Read a report; JSON has no word for what is not a number."""
    numbers: list[Any] = [math.nan if value is None else value for value in values]
    return Report(*numbers)


def answered(
    trainer: Trainer, kept: dict[int, Broadcast], evaluated: State, header: dict[str, Any], tensors: State
) -> tuple[dict[str, Any], State]:
    """Answer a request in a worker, which holds these broadcasts and this model to evaluate."""
    match header["do"]:
        case "train":
            tasks = [Task(*task) for task in header["tasks"]]
            states = {int(client): state for client, state in grouped(tensors).items()}
            work = trainer.train(tasks, kept, states)
            groups = {"folded": work.folded} | {str(client): state for client, state in work.states.items()}
            return {"reports": [list(report) for report in work.reports]}, joined(groups)
        case "slice":
            return {}, trainer.evaluate(evaluated["params"], header["start"])
        case "own test":
            return {}, trainer.evaluate_own(evaluated["params"], header["client"], tensors)
        case "new":
            aux = {name: value for name, value in evaluated.items() if name != "params"}
            sent = Broadcast(evaluated["params"], aux)
            return {}, {"scores": trainer.evaluate_new(sent, header["client"], header["steps"])}
        case _:
            states = {int(client): state for client, state in grouped(tensors).items()}
            own = states if header["own"] else None
            return {}, {"scores": trainer.evaluate_clients(evaluated["params"], header["clients"], own)}
