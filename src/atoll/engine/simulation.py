"""The driver of a simulated federation: feeds the coordinator, lets an engine do the work, makes the versions.

Shapes: C clients, D parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.algorithm import ServerTask
from atoll.core.coordinator import (
    Abandon,
    Arrived,
    Begin,
    Commit,
    Committed,
    Coordinator,
    CoordinatorState,
    Event,
    Finish,
    Reason,
    Send,
)
from atoll.core.errors import TrainingError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.engine.base import Engine, Progress, silent
from atoll.train.loop import knowledge
from atoll.train.metrics import Metrics, spread
from atoll.train.trainer import Work, finite


@dataclass(frozen=True)
class RunState:
    """All that a run is made of at a commit; writing it down and reading it back continues to the same bits."""

    params_D: Tensor
    server: State
    rule: State
    """What the aggregator remembers."""
    clients: dict[int, State] = field(default_factory=dict)
    coordinator: CoordinatorState = field(default_factory=CoordinatorState)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """What is known of one commit."""

    row: dict[str, Any]
    """Plain numbers, one line of the metrics file."""
    confusion_KK: np.ndarray | None = None
    clients: list[int] | None = None
    scores_C2: np.ndarray | None = None


class Simulation:
    """Runs a plan's rounds; iterate over `rounds()` and look at `state` and `reason`."""

    def __init__(self, plan: Plan, engine: Engine, coordinator: Coordinator, state: RunState | None = None) -> None:
        self.plan, self.engine, self.job, self.coordinator = plan, engine, engine.job, coordinator
        first_D = self.job.first_D.clone()
        self.state = state or RunState(first_D, self.job.algorithm.init_server(first_D), self.job.aggregator.init())
        self.reason: Reason | None = None

    def rounds(self, progress: Progress = silent, clock: Callable[[], float] = time.perf_counter) -> Iterator[Round]:
        """Yield after every commit, when `state` is whole and may be written down."""
        while self.reason is None:
            started = clock()
            state, done, reason = self._attempt(self.state, progress)
            if done is None:
                self.state = replace(state, seconds=state.seconds + clock() - started)
                self.reason = reason
                continue
            found = self._evaluate(done["round"], state.params_D)
            took = clock() - started
            self.state = state = replace(state, seconds=state.seconds + took)
            row = {**done, "round_seconds": round(took, 6), "seconds": round(state.seconds, 6), **found.row}
            yield replace(found, row=row)
            target = self.plan.stop.accuracy
            if target is not None and row.get("test", {}).get("accuracy", 0.0) >= target:
                self.reason = Reason.TARGET

    def _attempt(self, state: RunState, progress: Progress) -> tuple[RunState, dict[str, Any] | None, Reason | None]:
        """Follow the coordinator until it has a commit (and its row), abandons the attempt, or ends the run.

        `state` is a value: whatever interrupts this, the driver still holds the last commit.
        """
        row: dict[str, Any] | None = None
        events: list[Event] = [Begin()]
        while events:
            machine, commands = self.coordinator.step(state.coordinator, events.pop(0))
            state = replace(state, coordinator=machine)
            for command in commands:
                match command:
                    case Send(tasks):
                        events.append(Arrived(tasks))
                    case Commit(tasks):
                        state, row, committed = self._commit(state, tasks, progress)
                        events.append(committed)
                    case Abandon():
                        row = None
                    case Finish(reason):
                        return state, None, reason
        return state, row and {"round": state.coordinator.version, **row, **_counters(state.coordinator)}, None

    def _commit(
        self, state: RunState, tasks: tuple[Task, ...], progress: Progress
    ) -> tuple[RunState, dict[str, Any], Committed]:
        """Train the clients whose work counts, aggregate, and move the model if enough of them are valid."""
        job, version = self.job, state.coordinator.version
        sent = {version: Broadcast(state.params_D, job.algorithm.broadcast(state.params_D, state.server))}
        work = self._collude(state, tasks, self.engine.train(tasks, sent, state.clients, progress))
        valid = [report for report in work.reports if report.valid]
        if not valid:
            raise TrainingError(
                f"round {version + 1}: all {len(work.reports)} updates hold NaN or Inf: lower local.lr "
                f"(now {job.lr_of(version):g}), take fewer local steps, or check the data and the model"
            )
        state = replace(
            state,
            bytes_up=state.bytes_up + sum(report.bytes_up for report in work.reports),
            bytes_down=state.bytes_down + sum(report.bytes_down for report in work.reports),
        )
        if len(valid) >= self.coordinator.policy.min_reports:
            aggregate, rule = job.aggregator.finish(work.folded, state.rule)
            order = ServerTask(job.server_lr, version, self.coordinator.num_clients)
            params_D, server = job.algorithm.server_step(state.params_D, aggregate, state.server, order)
            clients = state.clients | work.states if work.states else state.clients
            state = replace(state, params_D=params_D, server=server, rule=rule, clients=clients)
        samples = sum(report.num_samples for report in valid)
        row = {
            "clients": len(valid),
            "samples": samples,
            "train_loss": sum(report.loss * report.num_samples for report in valid) / samples,
            "bytes_up": state.bytes_up,
            "bytes_down": state.bytes_down,
        }
        wanted = self.coordinator.sampler.score
        scores = {report.client: float(getattr(report, wanted)) for report in valid} if wanted else {}
        return state, row, Committed(len(valid), len(work.reports) - len(valid), scores)

    def _collude(self, state: RunState, tasks: tuple[Task, ...], work: Work) -> Work:
        """Let attackers who see every update change their own, then fold by the plan's rule."""
        job = self.job
        if job.attack is None or job.attack.collude is None or not work.folded:
            return work
        valid = [report for report in work.reports if report.valid]
        aux = {name.removeprefix("aux."): rows for name, rows in work.folded.items() if name.startswith("aux.")}
        honest = Update(work.folded["delta"], work.folded["weight"], aux)
        version = state.coordinator.version
        bad_C = torch.tensor([job.attacks(report.client, version) for report in valid])
        changed = job.attack.collude(honest, bad_C, knowledge(job, tasks[0], state.params_D))
        good_C = finite(changed)
        by_client = {report.client: bool(good) for report, good in zip(valid, good_C.tolist(), strict=True)}
        reports = [report._replace(valid=by_client.get(report.client, False)) for report in work.reports]
        folded = job.aggregator.add(job.aggregator.zero(), changed.rows(good_C)) if bool(good_C.any()) else {}
        return Work(folded, reports, work.states)

    def _evaluate(self, number: int, params_D: Tensor) -> Round:
        """Measure what the plan asks for after this round; the last round is always measured."""
        ask, last = self.plan.evaluation, number >= self.coordinator.rounds
        row: dict[str, Metrics] = {}
        confusion_KK = scores_C2 = None
        clients: list[int] | None = None
        if last or (ask.every and number % ask.every == 0):
            row["test"], confusion_KK = self.engine.evaluate(params_D)
        if ask.clients_every and (last or number % ask.clients_every == 0):
            clients = self._evaluated_clients()
            scores_C2 = self.engine.evaluate_clients(params_D, clients)
            row["clients_test"] = spread(scores_C2[:, 0], scores_C2[:, 1])
        return Round(row=row, confusion_KK=confusion_KK, clients=clients, scores_C2=scores_C2)

    def _evaluated_clients(self) -> list[int]:
        num, most = self.job.federation.num_clients, self.plan.evaluation.max_clients
        if num <= most:
            return list(range(num))
        rng = generator(self.plan.seed, "evaluated clients")
        return sorted(rng.choice(num, size=most, replace=False).tolist())


def _counters(machine: CoordinatorState) -> dict[str, int]:
    return {"failed": machine.failed, "rejected": machine.rejected, "abandoned": machine.abandoned}
