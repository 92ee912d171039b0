"""Engine: executes tasks and evaluations. Engines differ in where the work is done, never in what is computed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.aggregator import concatenate_rows, merge_rows
from atoll.core.errors import PlanError, TrainingError
from atoll.core.messages import Broadcast, State, Task
from atoll.core.options import Range
from atoll.train.attributes import as_before
from atoll.train.devices import (
    PLAIN,
    Place,
    Precision,
    TorchSettings,
    free_memory,
    give_back_memory,
    peak_memory,
    settled,
)
from atoll.train.evaluate import SLICE
from atoll.train.exchange import Work
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.kernels.build import Unavailable, is_built
from atoll.train.metrics import Metrics
from atoll.train.trainer import Trainer, explained, failed

Charts = dict[str, Any]
"""What the report draws of an evaluation, by metric."""
Progress = Callable[[int], None]
"""Called with the number of clients that are done."""


def silent(num_clients: int) -> None:
    """Show nothing."""


FILLED = 0.8
"""The share of a device's free memory that a stack may take."""
MOST_STACKED = 256
BUILDING = "building kernels, once: this may take some seconds"
COMPILING = "compiling the training step, once: this may take a minute"


def unheard(what: str) -> None:
    """Tell nobody what takes long while an engine is built."""


class Engine(ABC):
    """What a driver needs: train a cohort, evaluate a model, close."""

    holds_clients = True
    """Whether the clients' samples are here, so that clients can be evaluated."""
    counts_traffic = False
    """Whether its work says what was sent down, in place of one broadcast for each client."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self.job, self.trainer = job, trainer

    @property
    def num_workers(self) -> int:
        """How many worker processes there are; 0 where this process does everything."""
        return 0

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The engine's name and settings, as a plan would give them, so that a resumed run repeats them.

        The number of workers is left out, because it changes nothing.
        """

    @abstractmethod
    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Do groups of tasks; results come in the order of the groups."""

    @abstractmethod
    def slices(self, params_D: Tensor, starts: list[int]) -> Iterable[State]:
        """Evaluate slices of the test set; results come in order."""

    @abstractmethod
    def client_scores(
        self, params_D: Tensor, groups: list[list[int]], states: Mapping[int, State] | None
    ) -> Iterable[Tensor]:
        """Evaluate groups of clients, by their own models if states are given; results come in order."""

    @abstractmethod
    def own_tests(self, params_D: Tensor, states: Mapping[int, State]) -> Iterable[State]:
        """Evaluate these clients' own models on the test set; results come in order."""

    @abstractmethod
    def new_scores(self, sent: Broadcast, clients: Sequence[int], steps: Sequence[int]) -> Iterable[Tensor]:
        """Evaluate new clients, each after these numbers of steps; results come in order."""

    @abstractmethod
    def close(self) -> None:
        """Give back processes and threads."""

    def train(
        self,
        tasks: Sequence[Task],
        sent: Mapping[int, Broadcast],
        states: Mapping[int, State],
        progress: Progress = silent,
    ) -> Work:
        """Train a cohort and fold its updates in an order that depends on the tasks alone."""
        fold = self.trainer.fold
        merged, rows = Work(fold.zero(), [], {}), list[State]()
        for work in self.works(self.trainer.groups(tasks), sent, states):
            folded = merged.folded
            if fold.merge is merge_rows:
                rows.append(work.folded)  # copied once, when all are there
            elif work.folded:
                folded = fold.merge(folded, work.folded)
            merged = Work(folded, merged.reports + work.reports, merged.states | work.states)
            progress(len(merged.reports))
        return merged._replace(folded=concatenate_rows(rows)) if rows else merged

    def evaluate(self, params_D: Tensor) -> tuple[Metrics, Charts]:
        """Return figures on the central test set, and what is drawn of it."""
        starts = list(range(0, self.job.federation.dataset.num_test, SLICE))
        return self._figures(list(self.slices(params_D, starts)))

    def evaluate_own(self, params_D: Tensor, states: Mapping[int, State]) -> tuple[Metrics, Charts, np.ndarray]:
        """Return figures on the central test set of these clients' models pooled, and main figure and loss of each.

        The test set is the same for all, so that the pooled accuracy is the mean of the models' accuracies.
        """
        parts = list(self.own_tests(params_D, states))
        scores_C2 = torch.tensor(
            [self.job.measures.main_and_loss(_without_trigger(part)) for part in parts], dtype=torch.float64
        )
        figures, charts = self._figures(parts)
        return {**figures, "loss": float(scores_C2[:, 1].mean())}, charts, scores_C2.numpy()

    def _figures(self, parts: list[State]) -> tuple[Metrics, Charts]:
        """Return the figures of parts of an evaluation, with how often an attack's trigger worked."""
        measures = self.job.measures
        whole = measures.merge([_without_trigger(part) for part in parts])
        figures, charts = {**measures.finish(whole), **_attack_success(parts)}, measures.charts(whole)
        fairness = measures.fairness(whole)
        return figures, charts if fairness is None else {**charts, "fairness": fairness._asdict()}

    def evaluate_clients(
        self, params_D: Tensor, clients: list[int], states: Mapping[int, State] | None = None
    ) -> np.ndarray:
        """Return main figure and loss on each client's own data, (C, 2): of the shared model, or of their own ones.

        Clients' own models need their `states`, of which some may be missing.
        """
        groups = [clients[i : i + 20] for i in range(0, len(clients), 20)]
        scores: np.ndarray = torch.cat(list(self.client_scores(params_D, groups, states))).numpy()
        return scores

    def evaluate_new(self, sent: Broadcast, steps: Sequence[int]) -> np.ndarray:
        """Return main figure and loss of each new client on its own data, after these numbers of steps, (S, C, 2)."""
        rows = list(self.new_scores(sent, self.job.federation.new_clients, steps))
        scores: np.ndarray = torch.stack(rows, dim=1).numpy()
        return scores


def _without_trigger(part: State) -> State:
    return {name: value for name, value in part.items() if name not in ("fooled", "others")}


def _attack_success(parts: list[State]) -> Metrics:
    """The share of samples of other classes that a trigger turned into the target class, where there is a trigger."""
    others = sum(int(part["others"]) for part in parts if "others" in part)
    return {"attack_success": sum(int(part["fooled"]) for part in parts) / others} if others else {}


class InProcess(Engine):
    """Does everything here, one group after another."""

    def __init__(self, job: Job, trainer: Trainer, settings: TorchSettings | None = None) -> None:
        super().__init__(job, trainer)
        self._threads, self._settings = torch.get_num_threads(), settings
        torch.set_num_threads(1)  # sums then never depend on the number of cores

    def describe(self) -> dict[str, object]:
        """Name and settings."""
        if self.trainer.stack:
            return settings_of("vectorised", self.trainer)
        return {"name": "inline", **self.trainer.place.described()}

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Train group after group."""
        for group in groups:
            with explained():
                work = self.trainer.train(group, sent, states)
            yield work

    def slices(self, params_D: Tensor, starts: list[int]) -> Iterable[State]:
        """Evaluate slice after slice."""
        for start in starts:
            with explained():
                found = self.trainer.evaluate(params_D, start)
            yield found

    def client_scores(
        self, params_D: Tensor, groups: list[list[int]], states: Mapping[int, State] | None
    ) -> Iterable[Tensor]:
        """Evaluate group after group."""
        for group in groups:
            with explained():
                found = self.trainer.evaluate_clients(params_D, group, states)
            yield found

    def own_tests(self, params_D: Tensor, states: Mapping[int, State]) -> Iterable[State]:
        """Evaluate client after client."""
        for client, state in states.items():
            with explained():
                found = self.trainer.evaluate_own(params_D, client, state)
            yield found

    def new_scores(self, sent: Broadcast, clients: Sequence[int], steps: Sequence[int]) -> Iterable[Tensor]:
        """Evaluate client after client."""
        for client in clients:
            with explained():
                found = self.trainer.evaluate_new(sent, client, steps)
            yield found

    def close(self) -> None:
        """Give torch its threads and settings back."""
        torch.set_num_threads(self._threads)
        if self._settings is not None:
            self._settings.restore()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let torch use one thread, as engines do: a step that was compiled for more would be compiled again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def place_of(job: Job, device: str, precision: Precision, tf32: bool) -> Place:
    """Return where an engine computes, and how exactly; PlanError if that is not there."""
    double = job.spec.dtype == torch.float64 or job.private is not None
    return settled(Place(device, precision, tf32), double=double)


def in_process(job: Job, place: Place, trainer: Callable[[], Trainer]) -> Engine:
    """Return the engine of a trainer, which is made when torch is set for its place.

    On a device a step is rehearsed first, so that what stays on the processor is refused before training.
    """
    settings = TorchSettings(place)
    try:
        return InProcess(job, tried_there(place, trainer), settings)
    except BaseException:
        settings.restore()
        raise


def tried_there(place: Place, make: Callable[[], Trainer]) -> Trainer:
    """Make a trainer; on a device let it train one group for a step and evaluate a few samples, or raise PlanError."""
    if place.is_plain:
        return make()
    try:
        trainer = make()
        rehearse(trainer, 1)
        if trainer.job.shares_model and trainer.job.federation.dataset.num_test:
            trainer.worker.evaluate(trainer.placed.first_D, {}, trainer.placed.federation.test_samples(0, 2))
    except PlanError:
        raise
    except Exception as error:
        why = error if isinstance(error, TrainingError) else failed(error)
        raise PlanError(f"the plan does not run on {place.device}: {why}") from error
    return trainer


def stack_size(job: Job, num_tasks: int, place: Place = PLAIN) -> int:
    """How many clients to stack: a matter of the model's size and the cohort, never of the number of workers.

    Stacked parameters should stay within a few megabytes of cache, and there should be enough groups to share out. An
    accelerator is filled instead, as far as its memory goes, which is measured.
    """
    if not place.on_cpu:
        return measured_stack(job, num_tasks, place)
    by_memory = max(1, 4_000_000 // (job.spec.num_params * job.spec.dtype.itemsize))
    groups = 2 if num_tasks < 32 else 4 if num_tasks < 256 else 8
    return max(1, min(by_memory, 64, -(-num_tasks // groups)))


def measured_stack(job: Job, num_tasks: int, place: Place) -> int:
    """How many clients fit into the memory of a device, from the peaks of a step of one and of two clients.

    It is a power of two, so that a little more or less free memory does not change it.
    """
    device, peaks = place.torch_device, list[int]()
    for size in (1, min(2, num_tasks)):
        tried: list[int] = []
        peak = peak_memory(device, partial(_try_stack, job, size, place, tried))
        if tried == [0]:
            return 1
        peaks += [] if peak is None else [peak]
        give_back_memory(device)
    free, most = free_memory(device), min(MOST_STACKED, num_tasks)
    if free is not None and len(peaks) == 2:  # where nobody measures, a stack is halved until it fits
        each = max(1, peaks[1] - peaks[0])
        most = min(most, int((FILLED * free - peaks[0]) // each) + 1)
    return 1 << (max(1, most).bit_length() - 1)


def _try_stack(job: Job, size: int, place: Place, tried: list[int]) -> None:
    """Train so many clients as one for a step, and forget it; note how many there were, 0 if they cannot be stacked."""
    trainer = Trainer(job, stack=size, place=place)
    tried.append(trainer.stack)
    rehearse(trainer, 1)


Workers = Annotated[int, Range(1, 1024)]
Stack = Annotated[int, Range(0, 10**6, hint="0 is a plain loop")]


def worker_count(workers: int | None) -> int:
    """How many worker processes to use: as many as were asked for, or one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return workers or cores


def settings_of(name: str, trainer: Trainer) -> dict[str, object]:
    """An engine's name and how its trainer works."""
    settings: dict[str, object] = {"name": name, "stack": trainer.stack, "compile": trainer.compile}
    return {**settings, **({"kernels": True} if trainer.kernels else {}), **trainer.place.described()}


def trainer_of(
    job: Job,
    stack: int,
    compile: bool,
    kernels: bool,
    tell: Callable[[str], None] = unheard,
    place: Place = PLAIN,
) -> Trainer:
    """Return a trainer with settings of a plan or of a run directory, and say what takes long.

    Kernels that do not know the model leave it to recorded steps; where they cannot be compiled, PlanError is raised,
    since a run that was begun with them has other roundings without.
    """
    if kernels and stack and not is_built():
        tell(BUILDING)
    try:
        trainer = Trainer(job, stack=stack, compile=compile, kernels=kernels, place=place)
    except Unavailable as error:
        raise PlanError(
            f"engine.kernels is true, but {error}; mend that, or set engine.kernels = false in a new run, whose "
            "results differ in their last bits"
        ) from error
    if trainer.stack and trainer.compile:
        tell(COMPILING)
    return trainer


def rehearse(trainer: Trainer, steps: int) -> int:
    """Train one group of clients for a few steps and forget it, so that what is made once is made; return its size.

    Done before workers are forked, all of them inherit the recorded or compiled step. Buffers that clients keep have
    their first values afterwards, since a worker that is opened anew takes those of the model for the first.
    """
    job = trainer.job
    tasks = [Task(client, 0, 0) for client in range(min(max(1, trainer.stack), job.federation.num_clients))]
    sent = {0: broadcast_of(job, job.first_D, first_server(job, job.first_D))}
    trainer.rebind(replace(job, local=replace(job.local, epochs=None, steps=steps), attack=None))
    try:
        with ExitStack() as models:
            for each in (trainer.placed, *trainer.placed.architectures):
                models.enter_context(as_before(each.model))
            trainer.train(tasks, sent, {})
    finally:
        trainer.rebind(job)
    return len(tasks)
