"""The seat of a curious server: run a plan, and write down what its server sees of each round.

Shapes: R rows that the server can read, M values of a model. Updates are seen as they arrive, decoded and with the
noise that clients add; under secure aggregation the sums that are opened are seen, and nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from atoll.commit.parts import build_parts, open_ledger
from atoll.commit.run_state import RunState
from atoll.commit.secure_sum import Added, groups_of
from atoll.core.aggregator import Aggregator, rows_of
from atoll.core.coordinator import Coordinator
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, State, Task, Update, stack
from atoll.core.plan import Plan
from atoll.core.probe import Known, Samples, Sight
from atoll.engine.base import InProcess
from atoll.simulation.driver import Simulation
from atoll.simulation.overhearing import overhear
from atoll.train.exchange import Work
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job, broadcast_of
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


class _Seen(NamedTuple):
    rows: Update
    clients: tuple[tuple[int, ...], ...]
    num_samples: tuple[int, ...]
    attempt: int


class SeeingEngine(InProcess):
    """Trains one client after another, and keeps the rows that reach the server."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Trainer(job))
        self.trainer.fold = self._watched(self.trainer.fold)
        self._arrived: list[Update] = []
        self.seen: list[_Seen] = []

    def _watched(self, fold: Aggregator) -> Aggregator:
        def add(folded: State, updates: Update) -> State:
            self._arrived.append(updates)
            return fold.add(folded, updates)

        return fold._replace(add=add)

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Train group after group, and note whose rows arrived."""
        for group in groups:
            self._arrived.clear()
            [work] = super().works([group], sent, states)
            valid = [report for report in work.reports if report.valid]
            for rows in self._arrived[:1]:
                self.seen.append(
                    _Seen(
                        rows=rows,
                        clients=tuple((report.client,) for report in valid),
                        num_samples=tuple(report.num_samples for report in valid),
                        attempt=group[0].attempt,
                    )
                )
            yield work


class WatchedSimulation(Simulation):
    """A simulation whose secure sums are seen as they are opened, in place of what clients add."""

    def _add_in_secret(
        self, state: RunState, asked: tuple[Task, ...], lost: dict[int, str], work: Work
    ) -> tuple[Added, Work]:
        added, summed = super()._add_in_secret(state, asked, lost, work)
        assert isinstance(self.engine, SeeingEngine)
        self.engine.seen.clear()
        if summed.folded:
            rows = rows_of(summed.folded)
            survivors = [tuple(c for c in group if c in added.clients) for group in groups_of(self.engine.job, asked)]
            groups = tuple(group for group in survivors if group)
            self.engine.seen.append(_Seen(rows, groups, (0,) * len(groups), asked[0].attempt))
        return added, summed


def watch(
    plan: Plan,
    rounds: int,
    *,
    plant: Callable[[Known, Tensor], Tensor] | None = None,
    elsewhere: int = 2000,
    is_over: Callable[[], bool] = lambda: False,
) -> Watched:
    """Run some rounds of a plan, and return what its server sees; `plant` changes the model that the first one sends.

    `elsewhere` is how many test samples an attacker has of its own. No other round begins once time `is_over`.
    """
    if plan.policy.name != "cohort":
        raise PlanError(f"the red team looks at rounds of a cohort, not at {plan.policy.name}: set policy to cohort")
    federation = build_federation(plan)
    engines: list[SeeingEngine] = []

    def engine(job: Job, coordinator: Coordinator) -> SeeingEngine:
        if job.work.first is not None or not job.shares_model:
            raise PlanError("the red team needs a model that all share: use another algorithm, and leave work out")
        engines.append(SeeingEngine(job))
        return engines[0]

    parts = build_parts(plan.replace({"rounds": rounds}), federation, open_ledger(plan, None, begun=False), engine)
    job, known = parts.job, known_of(parts.job, elsewhere)
    simulation = WatchedSimulation(parts)
    if plant is not None:
        simulation.state = simulation.state._replace(params_D=plant(known, simulation.state.params_D))
    masked = overhear(simulation)
    sights, truths, before = list[Sight](), list[list[Truth]](), simulation.state
    try:
        for _ in simulation.rounds():
            seen, after = list(engines[0].seen), simulation.state
            engines[0].seen.clear()
            if seen and after.coordinator.version > before.coordinator.version:
                sights.append(_sight(job, before, after, seen))
                truths.append([Truth(clients, each.attempt) for each in seen for clients in each.clients])
            before = after
            if sights and masked:
                sights[-1] = sights[-1]._replace(masked=dict(masked))
                masked.clear()
            if is_over():
                break
    finally:
        engines[0].close()
    return Watched(known, sights, truths, job, simulation.state.params_D)


def _sight(job: Job, before: RunState, after: RunState, seen: list[_Seen]) -> Sight:
    rows = stack([each.rows.rows(place) for each in seen for place in range(len(each.clients))])
    sent = broadcast_of(job, before.params_D, before.server)
    return Sight(
        version=before.coordinator.version,
        model_M=job.model_of(sent).clone(),
        extras=dict(sent.aux),
        rows=rows,
        num_clients_R=tuple(len(clients) for each in seen for clients in each.clients),
        num_samples_R=tuple(num for each in seen for num in each.num_samples),
        after_M=after.params_D.clone(),
        sender_R=tuple(clients[0] if len(clients) == 1 else None for each in seen for clients in each.clients),
    )


def known_of(job: Job, elsewhere: int) -> Known:
    """Return what everybody knows of a job."""
    federation, model = job.federation, copy.deepcopy(job.model)
    x, y = federation.test_samples(0, min(elsewhere, federation.dataset.num_test)).load()
    x = job.inputs(x).contiguous()

    def outputs(model_M: Tensor, inputs: Tensor) -> Tensor:
        found: Tensor = functional_call(model, job.spec.views(model_M), (inputs,))
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
