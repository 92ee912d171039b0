"""Trainer: does tasks and evaluations in this process; engines are made of them. Shapes: C clients, D parameters."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator, stacked
from atoll.core.client_work import Sums, Trained
from atoll.core.errors import AtollError, TrainingError
from atoll.core.messages import SERVER, Broadcast, State, Task, Update, stack
from atoll.core.wire import packed_size
from atoll.privacy.grid import integer_sum
from atoll.train.crossing import Crossing, joined_parts
from atoll.train.devices import PLAIN, Place, give_back_memory, moved
from atoll.train.evaluate import SLICE, counts_right, evaluate_clients, evaluate_ready, ready_slices
from atoll.train.exchange import Told, Work, acceptable, decoded, encoded, protected, received
from atoll.train.job import Job
from atoll.train.kernels.chain import Unsuited
from atoll.train.kernels.trainer import KernelTrainer
from atoll.train.loop import Workspace, knowledge
from atoll.train.loop_worker import LoopWorker
from atoll.train.placing import on_device
from atoll.train.stack import StackedTrainer
from atoll.train.stackable import why_not, why_not_tried
from atoll.train.works.sgd import SgdWorker

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Where the code of torch and of Atoll lies: a line in there tells a user little."""

ADVICE = {
    "same device": "a tensor of the model, loss or algorithm stayed on the processor: keep it in a buffer "
    '(register_buffer), make it with device=x.device, or set engine.device = "cpu"',
    "out of memory": 'lower local.batch_size, choose a smaller model, or set engine.device = "cpu"',
    "vmap": 'this model cannot be stacked, so set engine = "inline"',
    "more than 1 value per channel": "batch norm needs two samples: choose a local.batch_size that leaves no batch of "
    "one, give every client more samples, or use group norm",
}
"""What to do about errors that are met often."""


WORTH_A_GROUP = 16
"""So many stacked clients of a small model cost hardly more than one."""


def fold_of(job: Job) -> Aggregator:
    """How updates are folded where they are made: by the rule, or as rows if they must be seen one by one first.

    Where a mechanism puts them on a grid, their sum is all that is made of them, here or under masks.
    """
    if job.mechanism is not None and job.mechanism.on_grid is not None and job.secure is None:
        return integer_sum()
    if job.wants_rows:
        return stacked(lambda updates_CD, weight_C: updates_CD)
    return job.aggregator


class Trainer:
    """Trains groups of `stack` clients by a recorded step; 0, or a model that does not allow it, is the plain loop.

    `alone_because` says why the model does not allow it. With `kernels` groups are trained by kernels if these know
    the model and all that is done with it, and `slow_because` says why they do not; where they cannot be compiled,
    Unavailable is raised.
    """

    def __init__(
        self,
        job: Job,
        *,
        stack: int = 0,
        compile: bool = False,
        kernels: bool = False,
        space: Workspace | None = None,
        place: Place = PLAIN,
    ) -> None:
        self.job, self.place = job, place
        self.placed = on_device(job, place)
        """The job with its model and samples on the device; `job` itself on the plain processor."""
        self._travels = None if place.is_plain or place.on_cpu else Crossing(place.torch_device)
        self.fold = fold_of(job)
        self.worker = job.work.open(self.placed) if space is None else SgdWorker(job, space)
        self._stacked: StackedTrainer | KernelTrainer | None = None
        self.alone_because: str | None = None
        self.slow_because: str | None = None
        self.kernels = kernels and stack > 0 and self._use_kernels(stack)
        if stack > 0 and not self.kernels:
            self._stacked = StackedTrainer(self._trained, size=stack, compile=compile)
            self.alone_because = self._why_alone(self._stacked)
            if self.alone_because is not None:
                self._stacked = None
        self.stack = stack if self._stacked is not None else 0
        self.compile = compile and self.stack > 0 and not self.kernels
        self._own_slices: list[tuple[Tensor, Tensor]] | None = None

    def rebind(self, job: Job) -> None:
        """Work on another job that differs in how much is trained only; what was traced stays good."""
        self.placed = on_device(job, self.place, self.placed)
        self.job, self.worker = job, job.work.open(self.placed)
        if self._stacked is not None:
            self._stacked.job = self._trained

    def _use_kernels(self, size: int) -> bool:
        """Train groups by kernels, if they can and if a trial gives the losses of the plain loop."""
        try:
            if not self.place.is_plain:
                raise Unsuited("kernels compute on the processor, in single precision")
            if not isinstance(self.worker, LoopWorker):
                raise Unsuited("clients do something else than steps of gradient descent")
            candidate = KernelTrainer(self._trained, size=size)
            with explained():
                self.slow_because = why_not_tried(self._trained, candidate, self._looping.space)
        except Unsuited as reason:
            self.slow_because = str(reason)
        if self.slow_because is None:
            self._stacked = candidate
        return self.slow_because is None

    def _why_alone(self, stacked: StackedTrainer) -> str | None:
        """Say why clients of this job must be trained one by one, if they were to be stacked."""
        reason = why_not(self._trained)
        if reason is not None:
            return reason
        tried = StackedTrainer(self._trained, size=stacked.size) if stacked.compile else stacked
        while True:
            try:
                with explained():
                    return why_not_tried(self._trained, tried, self._looping.space)
            except TrainingError as error:
                if not ran_out(error) or tried.size == 1:
                    raise
            stacked.size = tried.size = tried.size // 2
            give_back_memory(self.place.torch_device)

    def groups(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Tasks that are trained together: alike in length, and the same however many workers there are.

        Fewer than four full stacks are shared out to four smaller ones, as long as these are worth it.
        """
        ordered = sorted(tasks, key=lambda task: (-self.job.num_steps(task.client, task.work), task))
        size = max(1, min(self.stack, max(WORTH_A_GROUP, -(-len(tasks) // 4))))
        return [ordered[i : i + size] for i in range(0, len(ordered), size)]

    def train(self, tasks: list[Task], sent: Mapping[int, Broadcast], states: Mapping[int, State]) -> Work:
        """Do the tasks of one group; `sent` holds the broadcast of each version."""
        before = [states.get(task.client, {}) for task in tasks]
        broadcasts = [sent[task.version] for task in tasks]
        if self._stacked is not None:
            there = broadcasts if self._travels is None else self._travels.broadcasts(tasks, broadcasts)
            memories = [self._algorithm_state(*each) for each in zip(before, there, strict=True)]
            updates, losses, states_C = self._together(tasks, there, memories)
            after = [{name: rows[i] for name, rows in states_C.items()} for i in range(len(tasks))]
        else:
            ones = [self.train_one(*each) for each in zip(tasks, broadcasts, before, strict=True)]
            updates, losses = stack([one.update for one in ones]), [one.loss for one in ones]
            after = [one.state for one in ones]
        return self._send(tasks, broadcasts, before, updates, losses, after)

    def _together(
        self, tasks: list[Task], sent: list[Broadcast], memories: list[State]
    ) -> tuple[Update, list[float], State]:
        """Train clients as one; where a device has no memory for all of them, in halves, from then on.

        What comes is the same as of one stack, so that memory does not decide how updates are folded.
        """
        assert self._stacked is not None
        parts: list[tuple[Update, list[float], State]] = []
        start = 0
        while start < len(tasks):
            some = slice(start, start + max(1, self._stacked.size))
            try:
                parts.append(self._stack(tasks[some], sent[some], memories[some]))
                start = some.stop
                continue
            except torch.OutOfMemoryError:
                if self._stacked.size == 1:
                    raise
            self._stacked.size = -(-min(self._stacked.size, len(tasks)) // 2)  # when nothing holds on to the stack
            give_back_memory(self.place.torch_device)
        return parts[0] if len(parts) == 1 else joined_parts(parts)

    def _stack(
        self, tasks: list[Task], sent: list[Broadcast], memories: list[State]
    ) -> tuple[Update, list[float], State]:
        assert self._stacked is not None
        started = self._looping.begin(tasks, sent, memories)
        done = self._stacked.train(tasks, started.sent, started.memories, started.first_losses)
        updates, states_C = self._looping.end(done.update, done.states, started)
        if self._travels is not None:
            updates, states_C = self._travels.update_back(updates), self._travels.back(states_C)
        return updates, done.loss_G.tolist(), states_C

    def train_one(self, task: Task, sent: Broadcast, before: State) -> Trained:
        """Do one task alone; `before` is all that the client remembers."""
        if self._travels is not None:
            [sent] = self._travels.broadcasts([task], [sent])
        memory, samples = self._algorithm_state(before, sent), self.placed.federation.client_samples(task.client)
        with explained():
            done = self.worker.train(task, sent, memory, samples)
        if self._travels is None:
            return done
        return done._replace(update=self._travels.update_back(done.update), state=self._travels.back(done.state))

    def own_update(self, task: Task, sent: Broadcast) -> Update:
        """Return what the server's own samples make of a version, alone, so that all engines agree."""
        return self.train_one(task, sent, {}).update

    def own_scores(self, params_D: Tensor) -> tuple[float, float]:
        """Return the main figure and mean loss on the server's own samples, which are made ready once."""
        if not isinstance(self.worker, SgdWorker):
            own = self.placed.federation.client_samples(SERVER)
            return self.job.measures.main_and_loss(self.worker.evaluate(self._there(params_D), {}, own))
        if self._own_slices is None:
            self._own_slices = ready_slices(self.placed, SERVER)
        return evaluate_ready(self.placed, self.worker.space, self._there(params_D), self._own_slices)

    def evaluate(self, params_D: Tensor, start: int) -> Sums:
        """Evaluate the shared model on one slice of the test set."""
        if self._measuring is not None:
            return self._measuring.evaluate(params_D, start, SLICE)
        samples = self.placed.federation.test_samples(start, SLICE)
        return self._back(self.worker.evaluate(self._there(params_D), {}, samples))

    def evaluate_clients(self, params_D: Tensor, clients: list[int], states: Mapping[int, State] | None) -> Tensor:
        """Evaluate clients' own models, or the shared one if no states are given, on some clients' data.

        Returns main figure and loss (C, 2).
        """
        job, params_D = self.placed, self._there(params_D)
        if isinstance(self.worker, SgdWorker) and counts_right(job) and states is None:
            outputs = None if self._measuring is None else partial(self._measuring.outputs, params_D)
            return evaluate_clients(job, self.worker.space, params_D, clients, outputs=outputs)
        rows = []
        for client in clients:
            own = params_D, dict[str, Tensor]()
            if states is not None:
                own = self.worker.own(params_D, self._remembered(states.get(client, {})), client)
            samples = job.federation.client_samples(client, evaluation=True)
            rows.append(job.measures.main_and_loss(self.worker.evaluate(*own, samples)))
        return torch.tensor(rows, dtype=torch.float64)

    def measure_client(self, params_D: Tensor, client: int, state: State) -> Sums:
        """Return the parts of the plan's metrics of the shared or the client's own model on its evaluation samples."""
        slices = self.placed.federation.evaluation_slices(client, SLICE)
        with explained():
            own = self.worker.own(self._there(params_D), self._remembered(state), client)
            return self._back(self.job.measures.merge([self.worker.evaluate(*own, samples) for samples in slices]))

    def evaluate_new(self, sent: Broadcast, client: int, steps: Sequence[int]) -> Tensor:
        """Return main figure and loss (S, 2) of a new client's models on its held-out samples, after so many steps."""
        measures, slices = self.job.measures, self.placed.federation.evaluation_slices(client, SLICE)
        rows = []
        sent = Broadcast(self._there(sent.params_D), self._remembered(sent.aux))
        for num in steps:
            own = self._looping.arrived(sent, client, num)
            rows.append(measures.main_and_loss(measures.merge([self.worker.evaluate(*own, part) for part in slices])))
        return torch.tensor(rows, dtype=torch.float64)

    def evaluate_own(self, params_D: Tensor, client: int, state: State) -> Sums:
        """Evaluate a client's own model on the whole test set."""
        federation = self.placed.federation
        own = self.worker.own(self._there(params_D), self._remembered(state), client)
        starts = range(0, federation.dataset.num_test, SLICE)
        parts = [self.worker.evaluate(*own, federation.test_samples(start, SLICE, client)) for start in starts]
        return self._back(self.job.measures.merge(parts))

    def _there(self, params_D: Tensor) -> Tensor:
        return params_D if self._travels is None else params_D.to(self.placed.device)

    def _remembered(self, state: State) -> State:
        return state if self._travels is None else moved(state, self.placed.device)

    def _back(self, sums: Sums) -> Sums:
        return sums if self._travels is None else self._travels.back(sums)

    @property
    def _measuring(self) -> KernelTrainer | None:
        """The kernels that measure the model, where nothing but its outputs is measured."""
        plain = isinstance(self.worker, SgdWorker) and self.job.attack is None
        return self._stacked if plain and isinstance(self._stacked, KernelTrainer) else None

    @property
    def _looping(self) -> LoopWorker:
        """The worker of a job whose clients are trained as one."""
        assert isinstance(self.worker, LoopWorker)
        return self.worker

    @property
    def _trained(self) -> Job:
        """The job of the model that clients train, where it is one."""
        return self.worker.inner if isinstance(self.worker, LoopWorker) else self.job

    def _algorithm_state(self, state: State, sent: Broadcast) -> State:
        kept = {name: value for name, value in state.items() if not name.startswith("uplink.")}
        kept = self._remembered(kept)
        fresh = self.job.algorithm.init_client(sent.params_D) if self.job.work.uses_algorithm else {}
        return fresh | kept if fresh or kept else {}

    def _send(
        self,
        tasks: list[Task],
        broadcasts: list[Broadcast],
        before: list[State],
        updates: Update,
        losses: list[float],
        after: list[State],
    ) -> Work:
        """The way up: attacks, the uplink, the check for NaN and Inf, and the fold."""
        job = self.job
        updates = protected(job, tasks, updates)
        num_bytes = [packed_size(updates.rows(0).plain())] * len(tasks)
        bad = [job.attacks(task.client, task.version) for task in tasks]
        if job.uplink.transforms or (job.attack is not None and job.attack.update is not None and any(bad)):
            rows = []
            for i, task in enumerate(tasks):
                row = updates.rows(i)
                if bad[i] and job.attack is not None and job.attack.update is not None:
                    row = job.attack.update(row, knowledge(job, task, broadcasts[i].params_D))
                payload, memory = encoded(job, task, row, before[i])
                num_bytes[i] = packed_size(payload)
                after[i] |= memory
                rows.append(_fitting(decoded(job, row, payload), updates.rows(i)))
            updates = stack(rows)
        sizes = [job.federation.num_samples(task.client) for task in tasks]
        told = [Told(*each) for each in zip(sizes, losses, num_bytes, strict=True)]
        work = received(job, self.fold, tasks, updates, told)
        if not any(after):
            return work
        everyone = zip(tasks, after, acceptable(job, tasks, updates).tolist(), strict=True)
        states = {task.client: state for task, state, valid in everyone if state and valid}  # NaN is not remembered
        return work._replace(states=states)


def ran_out(error: Exception) -> bool:
    """Return whether an error says that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def failed(error: Exception) -> TrainingError:
    """What a model, a loss or another part raised while it was at work, as one line with the place and what to try."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_USERS)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return TrainingError(f"training failed: {what}{where}; {advice_on(what)}")


def advice_on(error: str) -> str:
    """Return what to try after an error that says this."""
    return next((advice for sign, advice in ADVICE.items() if sign in error), "check the model and the data")


@contextmanager
def explained() -> Iterator[None]:
    """Turn whatever is raised into an error that says what to do."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        raise failed(error) from error


def _fitting(sent: Update, honest: Update) -> Update:
    """What was sent, or NaN in its place if it has not the shape of an honest update, so that it is rejected."""
    if sent.delta_D.shape == honest.delta_D.shape and sent.weight.shape == honest.weight.shape:
        shapes = [{name: vector.shape for name, vector in each.aux.items()} for each in (sent, honest)]
        if shapes[0] == shapes[1]:
            return sent
    return honest._replace(delta_D=torch.full_like(honest.delta_D, torch.nan))
