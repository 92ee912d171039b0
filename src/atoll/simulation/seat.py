"""The seat of a curious server: run a plan, and write down what its server sees of each round.

Shapes: R rows that the server can read, M values of a model. Updates are seen as they arrive, decoded and with the
noise that clients add, before the server clips them or adds noise of its own. Under secure aggregation the sums that
are opened are seen, and nothing else. How many samples clients have is no secret: they say so when they join.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from atoll.commit.parts import build_parts, open_ledger
from atoll.commit.run_state import RunState
from atoll.commit.secure_sum import Added, groups_of
from atoll.commit.versions import valid_of
from atoll.core.aggregator import Aggregator, rows_of
from atoll.core.coordinator import Coordinator
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, State, Task, Update, stack
from atoll.core.plan import Plan
from atoll.core.privacy import ReleaseContext, SendContext
from atoll.core.probe import Known, Samples, Sight, frozen_as
from atoll.engine.base import InProcess, Progress
from atoll.simulation.devices import build_devices
from atoll.simulation.driver import Simulation
from atoll.simulation.overhearing import overhear
from atoll.train.exchange import Work, finite
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job
from atoll.train.trainer import Trainer


class Truth(NamedTuple):
    """What only a judge may know of a row: the clients behind it."""

    clients: tuple[int, ...]
    attempt: int


class Watched(NamedTuple):
    """What a server saw of a run, what it knows, and what a judge needs."""

    known: Known
    sights: list[Sight]
    truths: list[list[Truth]]
    """Of each sight the truth of each row."""
    job: Job
    final_M: Tensor


class _Row(NamedTuple):
    """A row as it is seen, and by what it came about."""

    update: Update
    tasks: tuple[Task, ...]
    sent: Broadcast


class SeeingEngine(InProcess):
    """Trains one client after another, and keeps what of their updates reaches the server."""

    def __init__(self, job: Job) -> None:
        self.arrived: dict[tuple[int, int], Update] = {}
        """The update of each client and attempt, as it came out of the uplink."""
        self._last: Update | None = None
        mechanism = job.mechanism
        on_grid = None if mechanism is None or job.secure is not None else mechanism.on_grid
        if mechanism is not None and on_grid is not None:
            job = replace(job, mechanism=mechanism._replace(on_grid=self._before_the_grid(on_grid)))
        super().__init__(job, Trainer(job))
        if on_grid is None:
            self.trainer.fold = self._watched(self.trainer.fold)

    def _watched(self, fold: Aggregator) -> Aggregator:
        def add(folded: State, updates: Update) -> State:
            self._last = updates
            return fold.add(folded, updates)

        return fold._replace(add=add)

    def _before_the_grid(self, on_grid: Callable[[Update, SendContext], Update]) -> Callable[..., Update]:
        """Note updates as they arrive at a server that is trusted to clip them and to add noise to their sum."""

        def noted(updates: Update, context: SendContext) -> Update:
            self._last = updates if bool(finite(updates).all()) else None  # what is not finite counts as zeros
            return on_grid(updates, context)

        return noted

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Train client after client, and note what arrives."""
        for [task] in groups:
            self._last = None
            [work] = super().works([[task]], sent, states)
            self.arrived.pop((task.client, task.attempt), None)
            if self._last is not None:
                self.arrived[task.client, task.attempt] = self._last.rows(0)
            yield work


class WatchedSimulation(Simulation):
    """A simulation that notes what its server sees of the last round: updates, or the sums that are opened."""

    engine: SeeingEngine
    seen: tuple[_Row, ...] = ()

    def _train(
        self, state: RunState, tasks: tuple[Task, ...], own: Update | None, progress: Progress
    ) -> tuple[RunState, Work]:
        state, work = super()._train(state, tasks, own, progress)
        done = {task.client: task for task in self._as_done(state, tasks)}
        arrived = {client: self.engine.arrived.pop((client, task.attempt), None) for client, task in done.items()}
        if self.job.attack is not None and self.job.attack.collude is not None and work.folded:
            rows = rows_of(work.folded)  # attackers changed theirs after they had seen all others
            arrived = {report.client: rows.rows(place) for place, report in enumerate(valid_of(work))}
        pairs = [(done[client], update) for client, update in arrived.items() if update is not None]
        self.seen = tuple(_Row(update, (task,), state.sent[task.version]) for task, update in pairs)
        return state, work

    def _add_in_secret(
        self, state: RunState, asked: tuple[Task, ...], lost: dict[int, str], work: Work
    ) -> tuple[Added, Work]:
        added, summed = super()._add_in_secret(state, asked, lost, work)
        survivors = [tuple(c for c in group if c in added.clients) for group in groups_of(self.job, asked)]
        groups = [group for group in survivors if group]
        done = {task.client: task for task in self._as_done(state, asked)}
        sums = self._opened(state, summed, groups) if summed.folded else []
        self.seen = tuple(
            _Row(update, tuple(done[client] for client in group), state.sent[asked[0].version])
            for update, group in zip(sums, groups, strict=True)
        )
        return added, summed

    def _opened(self, state: RunState, summed: Work, groups: list[tuple[int, ...]]) -> list[Update]:
        """Return the mean update behind each sum, in units of parameters."""
        mechanism, guard = self.job.mechanism, self.guard
        if mechanism is None or mechanism.on_grid is None:
            rows = rows_of(summed.folded)
            return [rows.rows(place) for place in range(len(rows.weight))]
        # whole numbers with the clients' noise in them: what is released is their sum by the expected cohort
        assert mechanism.release is not None and guard is not None and len(groups) == 1
        exposure = guard.exposure(state.coordinator.attempt + 1)
        context = ReleaseContext(exposure, self.job.secret, self.job.spec.dtype)
        released, _ = mechanism.release(summed.folded, state.rule, context)
        scale = released.num_clients / len(groups[0])
        aux = {name: scale * value for name, value in released.aux.items()}
        return [Update(scale * released.delta_D, torch.tensor(float(len(groups[0]))), aux)]


def watch(
    plan: Plan,
    rounds: int,
    *,
    plant: Callable[[Known, Tensor], Tensor] | None = None,
    elsewhere: int = 2000,
    is_over: Callable[[], bool] = lambda: False,
) -> Watched:
    """Run some rounds of a plan, and return what its server sees; `plant` changes the model that the first one sends.

    `elsewhere` is how many test samples an attacker has of its own. Where clients train while versions are committed,
    a round gives a sight for each version that its updates began with. No other round begins once time `is_over`.
    """
    if plan.split is not None:
        raise PlanError(
            "probes attack updates, and the server of split learning sees activations instead: leave split out"
        )
    federation, devices = build_federation(plan), build_devices(plan)

    def engine(job: Job, coordinator: Coordinator) -> SeeingEngine:
        must_be_attackable(job)
        return SeeingEngine(job)

    longer = plan if plan.rounds >= rounds else plan.replace({"rounds": rounds})
    parts = build_parts(longer, federation, open_ledger(plan, None, begun=False), engine)
    job, known = parts.job, known_of(parts.job, elsewhere)
    simulation = WatchedSimulation(parts, devices=devices)
    if plant is not None:
        simulation.state = simulation.state._replace(params_D=plant(known, simulation.state.params_D))
    masked = overhear(simulation)
    sights, truths = list[Sight](), list[list[Truth]]()
    try:
        for _ in simulation.rounds():
            after, seen = simulation.state, simulation.seen
            simulation.seen = ()
            for began in sorted({row.tasks[0].version for row in seen}):
                rows = [row for row in seen if row.tasks[0].version == began]
                sights.append(_sight(job, began, after.params_D, rows))
                truths.append([Truth(tuple(t.client for t in row.tasks), row.tasks[0].attempt) for row in rows])
            if sights and masked:
                sights[-1] = sights[-1]._replace(masked=dict(masked))
                masked.clear()
            if after.coordinator.version >= rounds or is_over():
                break
    finally:
        parts.engine.close()
    return Watched(known, sights, truths, job, simulation.state.params_D)


def must_be_attackable(job: Job) -> None:
    """Refuse what no probe can look at: it needs one whole model, and the steps by which clients change it."""
    kept = ", ".join(slot.name for slot in job.spec.kept[:3])
    reasons = {
        "clients do work of their own, and nobody else knows how it turns samples into numbers: leave out work": (
            job.work.own_model is None and not job.work.uses_algorithm
        ),
        "clients have models of their own and do not send one that all share: use another algorithm": (
            job.work.own_model is not None
        ),
        f"clients keep {kept} for themselves, without which nobody else can run the model: leave out keep and share, "
        "or use an algorithm that keeps nothing": bool(job.spec.kept),
        "attackers who collude see updates that are late by different amounts, and what they would send is not "
        'simulated: set policy = "cohort", or leave out attack': (
            job.keeps_rows and job.attack is not None and job.attack.collude is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise PlanError(f"the red team cannot look at this plan: {reason}")


def _sight(job: Job, version: int, after_M: Tensor, rows: list[_Row]) -> Sight:
    sizes = [[job.federation.num_samples(task.client) for task in row.tasks] for row in rows]
    steps = [[job.num_steps(task.client, task.work) for task in row.tasks] for row in rows]
    return Sight(
        version=version,
        model_M=job.model_of(rows[0].sent).clone(),
        extras=dict(rows[0].sent.aux),
        rows=stack([row.update for row in rows]),
        num_clients_R=tuple(len(row.tasks) for row in rows),
        num_samples_R=tuple(sum(each) for each in sizes),
        after_M=after_M.clone(),
        sender_R=tuple(row.tasks[0].client if len(row.tasks) == 1 else None for row in rows),
        num_steps_R=tuple(max(1, round(sum(each) / len(each))) for each in steps),
    )


def known_of(job: Job, elsewhere: int) -> Known:
    """Return what everybody knows of a job."""
    federation, model = job.federation, copy.deepcopy(job.model)
    x, y = federation.test_samples(0, min(elsewhere, federation.dataset.num_test)).load()
    x = job.inputs(x).contiguous()

    def outputs(model_M: Tensor, inputs: Tensor) -> Tensor:
        views = frozen_as(model, model_M.dtype) | job.spec.views(model_M)
        if job.spec.buffers:  # training mode moves statistics in place: those of a copy
            views |= job.spec.buffer_views(model_M[job.spec.num_trainable :].detach().clone())
        found: Tensor = functional_call(model, views, (inputs,))
        return found

    def batch_size(num_samples: int) -> int:
        return min(job.batch_size, num_samples)

    def num_steps(num_samples: int) -> int:
        steps = job.local.steps
        return (
            steps if steps is not None else (job.local.epochs or 1) * math.ceil(num_samples / batch_size(num_samples))
        )

    return Known(
        model=model,
        spec=job.spec,
        outputs=outputs,
        loss=job.loss,
        input_shape=federation.dataset.input_shape,
        num_classes=federation.dataset.num_outputs,
        tokens=federation.dataset.tokens,
        low=float(x.min()) if x.dtype.is_floating_point else 0.0,
        high=float(x.max()) if x.dtype.is_floating_point else 0.0,
        lr=job.lr_of,
        num_steps=num_steps,
        batch_size=batch_size,
        elsewhere=Samples(x, y),
        num_train=int(federation.training_sizes(federation.partition.sizes()).sum()),
        num_clients=federation.num_clients,
    )


def samples_of(watched: Watched, truth: Truth) -> Samples:
    """Return the training samples of the clients behind a row, as models get them: for the judge alone."""
    federation: Federation = watched.job.federation
    loaded = [federation.client_samples(client).load() for client in truth.clients]
    x = torch.cat([watched.job.inputs(each) for each, _ in loaded])
    return Samples(x.contiguous(), torch.cat([targets for _, targets in loaded]))
