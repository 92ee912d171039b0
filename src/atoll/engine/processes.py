"""Worker processes on one machine: each has one thread, shares the data by copy-on-write, and folds its own clients."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from atoll.core.errors import AtollError, PlanError, RunError, TrainingError
from atoll.core.messages import Broadcast, State
from atoll.core.options import Count
from atoll.core.plan import Plan
from atoll.engine.base import (
    Engine,
    Stack,
    Workers,
    place_of,
    rehearse,
    settings_of,
    single_threaded,
    stack_size,
    trainer_of,
    unheard,
    worker_count,
)
from atoll.engine.pipes import grouped, receive, send
from atoll.engine.pooled import Pooled, answered
from atoll.engine.rebuild import blueprint
from atoll.train.devices import CPU, Place, Precision, num_devices, parsed
from atoll.train.job import Job
from atoll.train.trainer import Trainer, explained


def processes(
    job: Job,
    cohort: Count = 10,
    workers: Workers | None = None,
    stack: Stack | None = None,
    compile: bool = False,
    kernels: bool = False,
    spawn: bool = False,
    device: str = CPU,
    precision: Precision = "float32",
    tf32: bool = False,
    tell: Callable[[str], None] = unheard,
    plan: Plan | None = None,
) -> Engine:
    """Share groups of clients out to worker processes, one a core unless `workers` says otherwise.

    `stack` is how many clients a worker trains as one; 0 is a plain loop, one after another. `kernels` trains chains of
    linear and convolutional layers by kernels in C. The result is the same to the bit for any number of workers: groups
    and the order of folding depend on the cohort alone.

    Workers are forked; with `spawn`, and on a device, they begin anew and build the plan themselves, one a device.
    `device`, `precision` and `tf32` are as of the engine `inline`; "cuda" stands for all that are there.
    """
    place = place_of(job, device, precision, tf32)
    if spawn or not place.on_cpu or not hasattr(os, "fork"):
        from atoll.engine.spawned import Spawned

        if plan is None:
            raise PlanError(
                f"workers on {place.device} build the plan themselves, and there is none here: "
                'set engine = "vectorised", or run the plan by itself'
            )
        return Spawned(
            job,
            blueprint(plan, job),
            place,
            workers=workers,
            cohort=cohort,
            stack=stack,
            compile=compile,
            kernels=kernels,
        )
    num_workers = worker_count(workers)
    with single_threaded():
        size = stack_size(job, cohort) if stack is None else stack
        trainer = trainer_of(job, size, compile, kernels, tell, place)
        if trainer.stack > 1 and not trainer.kernels:
            with explained():
                rehearse(trainer, 1)
    return Processes(job, trainer, num_workers)


def devices_of(place: Place, workers: int | None) -> list[Place]:
    """Return the place of each worker: one a device of the kind, in turn if there are more workers."""
    kind, index = parsed(place.device)
    if place.on_cpu:
        return [place] * worker_count(workers)
    if index is not None or num_devices(kind) == 1:
        return [place] * (workers or 1)
    num = num_devices(kind)
    return [place.numbered(worker % num) for worker in range(workers or num)]


class WorkerProcess(Protocol):
    """A process that answers requests."""

    @property
    def exitcode(self) -> int | None:
        """How it ended; None while it lives."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def is_alive(self) -> bool:
        """Return whether it has not ended."""

    def kill(self) -> None:
        """End it at once."""


class Processes(Pooled):
    """A farm of forked workers; requests go out in order, a few ahead of the answers."""

    def __init__(self, job: Job, trainer: Trainer, num_workers: int) -> None:
        super().__init__(job, trainer)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pipes: list[Connection] = []
        self._workers: list[WorkerProcess] = []
        self._start(num_workers)

    def _start(self, num_workers: int) -> None:
        context, trainer = get_context("fork"), self.trainer
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


def _serve(pipe: Connection, others: list[Connection], trainer: Trainer) -> None:
    """A worker's life: answer requests until the pipe closes, which it does when the parent ends for any reason."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # to stop is the parent's business, also when all are told at once
    threading.Thread(target=end_with_parent, daemon=True).start()
    for other in others:
        other.close()
    serve(pipe, trainer)
    os._exit(0)


def serve(pipe: Connection, trainer: Trainer) -> None:
    """Answer requests until the pipe closes."""
    torch.set_num_threads(1)
    if trainer.compile:
        from torch._inductor import config as inductor

        inductor.compile_threads = 1  # the threads that compile were not forked: waiting for them would never end
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
                    answer = answered(trainer, kept, evaluated, header, tensors)
            except AtollError as error:
                answer = ({"error": str(error)}, {})
            send(pipe, *answer)


def end_with_parent() -> None:
    """End at once when the parent is killed: a worker in the middle of a long task would go on and hold its locks."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
