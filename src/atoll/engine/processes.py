"""Worker processes on one machine: each has one thread, shares the data by copy-on-write, and folds its own clients."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import AtollError, PlanError, RunError, TrainingError
from atoll.core.messages import Broadcast, State, Task
from atoll.core.options import Count
from atoll.engine.base import (
    COMPILING,
    Engine,
    Stack,
    Workers,
    rehearse,
    settings_of,
    stack_size,
    unheard,
    worker_count,
)
from atoll.engine.pipes import grouped, joined, receive, send
from atoll.train.exchange import Report, Work
from atoll.train.job import Job
from atoll.train.trainer import Trainer, explained


def processes(
    job: Job,
    cohort: Count = 10,
    workers: Workers | None = None,
    stack: Stack | None = None,
    compile: bool = False,
    tell: Callable[[str], None] = unheard,
) -> Engine:
    """Share groups of clients out to worker processes, one a core unless `workers` says otherwise.

    `stack` is how many clients a worker trains as one; 0 is a plain loop, one after another. The result is the same to
    the bit for any number of workers: groups and the order of folding depend on the cohort alone.
    """
    num_workers = worker_count(workers)
    if not hasattr(os, "fork"):
        raise PlanError('engine "processes" needs fork, which this system lacks: use engine = "vectorised"')
    trainer = Trainer(job, stack=stack_size(job, cohort) if stack is None else stack, compile=compile)
    if trainer.stack > 1:
        if trainer.compile:
            tell(COMPILING)
        with explained():
            rehearse(trainer, 1)
    return Processes(job, trainer, num_workers)


class Processes(Engine):
    """A farm of forked workers; requests go out in order, a few ahead of the answers."""

    def __init__(self, job: Job, trainer: Trainer, num_workers: int) -> None:
        super().__init__(job, trainer)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pipes: list[Connection] = []
        self._workers: list[BaseProcess] = []
        self._kept: dict[int, Broadcast] = {}  # what the workers have been sent
        context = get_context("fork")
        for _ in range(num_workers):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there, [*self._pipes, here], trainer), daemon=True)
            worker.start()
            there.close()
            self._pipes.append(here)
            self._workers.append(worker)

    @property
    def num_workers(self) -> int:
        """How many worker processes there are."""
        return len(self._workers)

    def describe(self) -> dict[str, object]:
        """Name and settings."""
        return settings_of("processes", self.trainer)

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
            reports = [_report(each) for each in header["reports"]]
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

    def close(self) -> None:
        """End the workers and give torch its threads back."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(timeout=2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._pipes, self._workers = [], []
        torch.set_num_threads(self._threads)

    def _tell(self, header: dict[str, Any], tensors: State) -> None:
        for pipe in self._pipes:
            self._send(pipe, header, tensors)

    def _send(self, pipe: Connection, header: dict[str, Any], tensors: State) -> None:
        try:
            send(pipe, header, tensors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death(pipe) from error

    def _death(self, pipe: Connection) -> RunError:
        worker = self._workers[self._pipes.index(pipe)]
        worker.join(timeout=1)
        return RunError(
            f"a worker process died (exit code {worker.exitcode}): if memory ran out, use fewer workers or a smaller "
            "stack with --set engine.workers=1; then continue with --resume"
        )

    def _farm(self, requests: Iterable[tuple[dict[str, Any], State]]) -> Iterator[tuple[dict[str, Any], State]]:
        """Give each worker one request at a time; yield the answers in the order of the requests.

        No request goes out that is far ahead of the oldest missing answer, so few answers are ever held back.
        """
        pending = enumerate(requests)
        busy: dict[Connection, int] = {}
        answers: dict[int, tuple[dict[str, Any], State]] = {}
        next_out, exhausted = 0, False
        while True:
            for pipe in self._pipes:
                newest = max([*busy.values(), *answers, next_out])
                if exhausted or pipe in busy or newest - next_out > 2 * len(self._pipes):
                    continue
                item = next(pending, None)
                if item is None:
                    exhausted = True
                    break
                busy[pipe] = item[0]
                self._send(pipe, *item[1])
            if next_out in answers:
                yield answers.pop(next_out)
                next_out += 1
                continue
            if not busy:
                return
            for ready in wait(list(busy)):
                pipe = ready  # type: ignore[assignment]
                try:
                    header, tensors = receive(pipe)
                except (EOFError, ConnectionResetError) as error:
                    raise self._death(pipe) from error
                if "error" in header:
                    raise TrainingError(header["error"])
                answers[busy.pop(pipe)] = (header, tensors)


def _report(values: list[Any]) -> Report:
    """Read a report; JSON has no word for what is not a number."""
    numbers: list[Any] = [math.nan if value is None else value for value in values]
    return Report(*numbers)


def _serve(pipe: Connection, others: list[Connection], trainer: Trainer) -> None:
    """A worker's life: answer requests until the pipe closes, which it does when the parent ends for any reason."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # to stop is the parent's business, also when all are told at once
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    torch.set_num_threads(1)
    kept: dict[int, Broadcast] = {}
    evaluated: State = {}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            header, tensors = receive(pipe)
            if header["do"] == "keep":
                fresh = {
                    int(version): Broadcast(each.pop("params"), each) for version, each in grouped(tensors).items()
                }
                kept = {version: fresh.get(version) or kept[version] for version in header["versions"]}
                continue
            if header["do"] == "look at":
                evaluated = tensors
                continue
            try:
                with explained():
                    answer = _answer(trainer, kept, evaluated, header, tensors)
            except AtollError as error:
                answer = ({"error": str(error)}, {})
            send(pipe, *answer)
    os._exit(0)


def end_with_parent() -> None:
    """End at once when the parent is killed: a worker in the middle of a long task would go on and hold its locks."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(
    trainer: Trainer, kept: dict[int, Broadcast], evaluated: State, header: dict[str, Any], tensors: State
) -> tuple[dict[str, Any], State]:
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
