"""The driver of a simulated federation: feeds the coordinator, lets an engine do the work, makes the versions.

Shapes: C clients, D parameters.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from atoll.core.aggregator import as_rows, rows_of
from atoll.core.coordinator import (
    Abandon,
    Arrived,
    Begin,
    Commit,
    Committed,
    Coordinator,
    CoordinatorState,
    Deadline,
    Event,
    Failed,
    Finish,
    Phase,
    Reason,
    Send,
)
from atoll.core.detection import Detector, Sight
from atoll.core.devices import INSTANT, Devices, Load
from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError, TrainingError
from atoll.core.messages import SERVER, Broadcast, Payload, State, Task, Update, stack
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.core.transform import Encoding
from atoll.core.wire import packed_size
from atoll.engine.base import Engine, Progress, silent
from atoll.engine.guarding import Guard, must_fit
from atoll.engine.run_state import Ahead, Journey, Round, RunState, why_stop
from atoll.train.judging import detection_row, judged
from atoll.train.loop import knowledge
from atoll.train.metrics import Metrics, spread
from atoll.train.server import aggregated, server_task
from atoll.train.trainer import Report, Work, finite

LOOK_AHEAD = 4
"""Where few updates make a version, so many stacks of clients are trained ahead of their arrival."""
PATIENCE = 60.0
"""Simulated seconds until clients are asked again after an attempt that came to nothing."""


class Simulation:
    """Runs a plan's rounds; iterate over `rounds()` and look at `state` and `reason`."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        coordinator: Coordinator,
        state: RunState | None = None,
        devices: Devices = INSTANT,
        guard: Guard | None = None,
    ) -> None:
        must_fit(engine.job, guard)
        self.plan, self.engine, self.job, self.coordinator = plan, engine, engine.job, coordinator
        self.devices, self.guard = devices, guard
        self._all_eligible = plan.eligibility == Eligibility()
        first_D = self.job.first_D.clone()
        rule = self.job.aggregator.init() if guard is None else guard.init()
        self.state = state or RunState(first_D, self.job.algorithm.init_server(first_D), rule, upload=first_D.nbytes)
        self.reason: Reason | None = None
        self.last_row: dict[str, Any] | None = None
        """What is known of the last round; whoever gives a state gives this too."""

    def rounds(self, progress: Progress = silent, clock: Callable[[], float] = time.perf_counter) -> Iterator[Round]:
        """Yield after every commit, when `state` is whole and may be written down.

        A round that takes more bytes than are left is not counted. The last one that counts is yielded again if it has
        not been measured: nobody knew that it was the last.
        """
        while self.reason is None:
            started = clock()
            if self._is_spent():
                self.reason = Reason.PRIVACY
                yield from self._last_look()
                return
            state, done, reason = self._attempt(self.state, progress)
            if self.plan.stop.bytes is not None and state.bytes_up + state.bytes_down > self.plan.stop.bytes:
                self._must_buy_a_round(state)
                self.reason = Reason.BYTES
                yield from self._last_look()
                return
            if done is None:
                self.state = state._replace(seconds=state.seconds + clock() - started)
                self.reason = reason
                continue
            so_far = {**done, "seconds": state.seconds + clock() - started}
            reason = why_stop(self.plan.stop, so_far)
            found = self._evaluate(done["round"], state, last=reason is not None)
            took = clock() - started
            self.state = state = state._replace(seconds=state.seconds + took)
            row = {**done, "round_seconds": round(took, 6), "seconds": round(state.seconds, 6), **found.row}
            self.last_row = row
            yield replace(found, row=row)
            self.reason = reason or why_stop(self.plan.stop, row)

    def _is_spent(self) -> bool:
        """Whether privacy does not pay for another attempt."""
        machine = self.state.coordinator
        more = self.guard is not None and machine.version < self.coordinator.rounds
        return more and self.guard is not None and not self.guard.allows(machine.attempt)

    def _last_look(self) -> Iterator[Round]:
        """Measure the last round if it has not been: nobody knew that it was the last."""
        if self.last_row is not None and "test" not in self.last_row:
            found = self._evaluate(self.last_row["round"], self.state, last=True)
            yield replace(found, row={**self.last_row, **found.row})

    def _must_buy_a_round(self, state: RunState) -> None:
        if self.state.coordinator.version == 0:
            raise PlanError(
                f"stop.bytes of {self.plan.stop.bytes:,} does not pay for one round, which takes "
                f"{state.bytes_up + state.bytes_down:,}: raise it, ask fewer clients, or compress (uplink, downlink)"
            )

    def _attempt(self, state: RunState, progress: Progress) -> tuple[RunState, dict[str, Any] | None, Reason | None]:
        """Follow the coordinator until it has a commit (and its row), abandons the attempt, or ends the run.

        `state` is a value: whatever interrupts this, the driver still holds the last commit.
        """
        began, row = state.clock, None
        event: Event = self._begin(state)
        while True:
            machine, commands = self.coordinator.step(state.coordinator, event)
            state = state._replace(coordinator=machine)
            if row is not None and isinstance(event, Committed) and not commands:
                row = {"round": machine.version, **row, **_counters(machine)}
                return state, row if self.guard is None else self.guard.told(row, machine.attempt), None
            committed: Event | None = None
            for command in commands:
                match command:
                    case Send(tasks):
                        state = self._send(state, tasks)
                    case Commit(tasks):
                        state, row, committed = self._commit(state, tasks, progress)
                    case Abandon(attempt):
                        if self.guard is not None:
                            self.guard.charge(attempt)
                        return self._wait(self._forget(state)), None, None
                    case Finish(reason):
                        return state, None, reason
            if committed is not None:
                event = committed
            elif machine.phase is Phase.READY:  # somebody was lost, and another is asked in place
                event = self._begin(state)
            else:
                state, event = self._next(state, began)

    def _begin(self, state: RunState) -> Begin:
        devices, rule, now, shut_out = self.devices, self.plan.eligibility, state.clock, frozenset(state.quarantined)
        if devices is INSTANT:
            return Begin(lambda client: client not in shut_out) if shut_out else Begin()

        def may(client: int) -> bool:
            if client in shut_out or not devices.reachable(client, now):
                return False
            return self._all_eligible or rule.why_not(devices.attributes(client, now)) is None

        return Begin(may)

    def _wait(self, state: RunState) -> RunState:
        """Let some time pass if nobody is at work."""
        idle = self.devices is not INSTANT and not state.coordinator.in_flight
        return state._replace(clock=state.clock + PATIENCE) if idle else state

    def _send(self, state: RunState, tasks: tuple[Task, ...]) -> RunState:
        """Set tasks on their way."""
        machine = state.coordinator
        if self.guard is not None and self.guard.trusts_nobody:
            self.guard.charge(machine.attempt)
        state, costs = self._broadcast(state, [task.client for task in tasks])
        loads = [
            Load(task.client, self._passes(state, task), down, state.upload)
            for task, down in zip(tasks, costs, strict=True)
        ]
        seeded = generator(self.plan.seed, "trips", machine.attempt)
        trips = self.devices.trips(loads, self.guard.rng("trips", machine.attempt) if self.guard else seeded)
        pairs = list(zip(tasks, trips, strict=True))
        journeys = list(state.journeys)
        for task, trip in pairs:
            insort(journeys, Journey(task, state.clock + trip.seconds, trip.fails), key=attrgetter("ends"))
        return state._replace(
            journeys=tuple(journeys),
            works={**state.works, **{task: trip.work for task, trip in pairs if trip.work != 1}},
            bytes_down=state.bytes_down + sum(costs),
        )

    def _broadcast(self, state: RunState, clients: list[int]) -> tuple[RunState, list[int]]:
        """Send the newest version to clients; how many bytes that takes for each of them."""
        job, machine = self.job, state.coordinator
        if machine.version not in state.sent:
            fresh = Broadcast(state.params_D, job.algorithm.broadcast(state.params_D, state.server))
            rng = generator(self.plan.seed, "downlink", machine.attempt)
            found, memory = job.downlink.send(fresh, state.downlink, Encoding(job.spec, machine.attempt, rng))
            state = state._replace(
                sent={**state.sent, machine.version: found.broadcast},
                downlink=memory,
                news=state.news + found.num_bytes,
                last_news=found.num_bytes,
            )
        if not job.downlink.by_difference:
            return state, [state.last_news] * len(clients)
        whole = packed_size(Payload(state.downlink["known"]))
        costs = [min(whole, state.news - state.heard[client]) if client in state.heard else whole for client in clients]
        return state._replace(heard={**state.heard, **dict.fromkeys(clients, state.news)}), costs

    def _next(self, state: RunState, began: float) -> tuple[RunState, Event]:
        """What happens next: those tasks end that end first, or the attempt's time does.

        Where clients work on after a commit, nobody is asked until the next commit or loss, so that all who arrive
        before that may arrive in one event.
        """
        first, policy = state.journeys[0], self.coordinator.policy
        if policy.deadline is not None and first.ends > began + policy.deadline:
            return state._replace(clock=began + policy.deadline), Deadline(state.coordinator.attempt)
        if policy.keeps_tasks:
            room = policy.goal(self.coordinator.num_clients) - len(state.coordinator.arrived)
            arriving = takewhile(lambda journey: not journey.fails, state.journeys)
            together = state.journeys[:1] if first.fails else tuple(islice(arriving, room))
        else:
            together = tuple(takewhile(lambda journey: journey[1:] == first[1:], state.journeys))
        ended = tuple(journey.task for journey in together)
        state = state._replace(clock=together[-1].ends, journeys=state.journeys[len(ended) :])
        if not first.fails:
            return state, Arrived(ended)
        lost = {task.client for task in ended}  # and who knows what they have heard
        return state._replace(heard={c: v for c, v in state.heard.items() if c not in lost}), Failed(ended)

    def _commit(
        self, state: RunState, tasks: tuple[Task, ...], progress: Progress
    ) -> tuple[RunState, dict[str, Any], Committed]:
        """Train the clients whose work counts, aggregate, and move the model if enough of them are valid."""
        job, version, policy = self.job, state.coordinator.version, self.coordinator.policy
        own = self._own_update(state)
        state, work, late = self._train(state, tasks, own, progress)
        valid = [report for report in work.reports if report.valid]
        if not valid and policy.min_reports > 0:
            attacked = any(job.attacks(task.client, task.version) for task in tasks)
            if attacked or policy.keeps_tasks:  # bad clients must not end the run
                return self._forget(state), {}, Committed(0, len(work.reports))
            raise TrainingError(
                f"round {version + 1}: all {len(work.reports)} updates hold NaN or Inf: lower local.lr "
                f"(now {job.lr_of(version):g}), take fewer local steps, or check the data and the model"
            )
        state = state._replace(
            bytes_up=state.bytes_up + sum(report.bytes_up for report in work.reports),
            samples=state.samples + sum(self._passes(state, task) for task in self._as_done(state, tasks)),
        )
        if self.guard is None:  # else how much one client sends would decide whether another comes in time
            upload = max(state.upload if version else 0, *(report.bytes_up for report in work.reports))
            state = state._replace(upload=upload)
        told: dict[str, Any] = {}
        if len(valid) >= policy.min_reports:
            state, work, told = self._move(state, tasks, work, own)
            valid = [report for report in work.reports if report.valid]
        row = {**self._numbers(state, valid), **({"detection": told} if told else {})}
        if policy.keeps_tasks:
            row["staleness"] = late
        wanted = self.coordinator.sampler.score
        scores = {report.client: float(getattr(report, wanted)) for report in valid} if wanted else {}
        return self._forget(state), row, Committed(len(valid), len(work.reports) - len(valid), scores)

    def _move(
        self, state: RunState, tasks: tuple[Task, ...], work: Work, own: Update | None
    ) -> tuple[RunState, Work, dict[str, Any]]:
        """Aggregate what a round's clients sent, and move the model; detection may leave some of them out."""
        job, machine = self.job, state.coordinator
        told: dict[str, Any] = {}
        if self.guard is None:
            aggregate, rule = aggregated(job, work.folded, state.rule, own)
        else:
            aggregate, rule = self.guard.aggregated(work.folded, state.rule, machine.attempt, own)
        if job.detector is not None:
            num_before = sum(report.valid for report in work.reports)
            state, work, told = self._detect(state, job.detector, work, aggregate.delta_D)
            if sum(report.valid for report in work.reports) < num_before:  # once more, without those who were found out
                aggregate, rule = aggregated(job, work.folded, state.rule, own)
        if self.coordinator.policy.mixes:
            [task] = tasks
            gap_D = state.sent[task.version].params_D - state.params_D
            aggregate = aggregate._replace(delta_D=aggregate.delta_D + self._counts(state, task) * gap_D)
        order = server_task(job, machine.version, self.coordinator.num_clients)
        params_D, server = job.algorithm.server_step(state.params_D, aggregate, state.server, order)
        clients = {**state.clients, **work.states} if work.states else state.clients
        return state._replace(params_D=params_D, server=server, rule=rule, clients=clients), work, told

    def _numbers(self, state: RunState, valid: list[Report]) -> dict[str, Any]:
        """What a round has taken."""
        samples = sum(report.num_samples for report in valid)
        found: dict[str, Any] = {
            "clients": len(valid),
            "samples": samples,
            "train_loss": sum(report.loss * report.num_samples for report in valid) / max(1, samples),
            "bytes_up": state.bytes_up,
            "bytes_down": state.bytes_down,
            "samples_trained": state.samples,
        }
        return found if self.devices is INSTANT else {**found, "simulated_seconds": round(state.clock, 6)}

    def _detect(
        self, state: RunState, detector: Detector, work: Work, aggregate_D: Tensor
    ) -> tuple[RunState, Work, dict[str, Any]]:
        """Look at a round's updates, and leave out those of clients that are quarantined now.

        As many clients stay as the rule needs, in this round and among those who can still be asked.
        """
        rows, valid, params_D = rows_of(work.folded), [r for r in work.reports if r.valid], state.params_D
        least = self.coordinator.policy.min_reports
        most = min(len(valid), self.coordinator.num_clients - len(state.quarantined)) - least

        def loss(delta_D: Tensor | None) -> float:
            return self.engine.trainer.own_loss(params_D if delta_D is None else params_D + delta_D)

        sight = Sight(rows.delta_D, aggregate_D, loss)
        clients = [report.client for report in valid]
        found = judged(detector, clients, sight, state.trust, state.quarantined, most)
        keep_C = torch.tensor([client not in found.quarantined for client in clients])
        reports = [r._replace(valid=r.valid and r.client not in found.quarantined) for r in work.reports]
        state = state._replace(trust=found.trust, quarantined=found.quarantined)
        told = detection_row(found, self.job.attackers)
        return state, Work(as_rows(rows.rows(keep_C)), reports, work.states), told

    def _own_update(self, state: RunState) -> Update | None:
        """What the server's own samples make of the current version, where the rule compares with it."""
        if self.job.aggregator.trust is None:
            return None
        machine, algorithm = state.coordinator, self.job.algorithm
        sent = state.sent.get(machine.version)  # what clients heard
        if sent is None:
            sent = Broadcast(state.params_D, algorithm.broadcast(state.params_D, state.server))
        own = self.engine.trainer.own_update(Task(SERVER, machine.version, machine.attempt), sent)
        if not bool(finite(stack([own]))[0]):
            raise TrainingError(
                f"round {machine.version + 1}: the server's own update holds NaN or Inf: lower local.lr, "
                "or take other server.samples"
            )
        return own

    def _passes(self, state: RunState, task: Task) -> int:
        return self.job.num_passes(task, first=task.client not in state.clients)

    def _as_done(self, state: RunState, tasks: Iterable[Task]) -> list[Task]:
        """The tasks with as much of their work as there was time for."""
        done = [task._replace(work=state.works[task]) if task in state.works else task for task in tasks]
        return done if self.guard is None else self.guard.orders(done, state.rule)

    def _counts(self, state: RunState, task: Task) -> float:
        """How much a task's update counts that is late by some versions."""
        return self.coordinator.policy.staleness(state.coordinator.version - task.version)

    def _forget(self, state: RunState) -> RunState:
        """Drop what nobody works on any more."""
        if not self.coordinator.policy.keeps_tasks:
            return state._replace(journeys=(), works={}, sent={})
        machine, ahead, works = state.coordinator, dict(state.ahead), dict(state.works)
        for task in machine.committing:
            ahead.pop(task.client, None)
            works.pop(task, None)
        versions = {task.version for task in (*machine.in_flight.values(), *machine.arrived)}
        sent = {version: sent for version, sent in state.sent.items() if version in versions}
        return state._replace(works=works, sent=sent, ahead=ahead)

    def _train(
        self, state: RunState, tasks: tuple[Task, ...], own: Update | None, progress: Progress
    ) -> tuple[RunState, Work, float]:
        """Train tasks that have arrived, fold their updates, and tell by how many versions they are late on average."""
        if not self.coordinator.policy.keeps_tasks:
            done = self.engine.train(self._as_done(state, tasks), state.sent, state.clients, progress)
            return state, self._collude(state, tasks, done, own), 0.0
        state = self._train_ahead(state, tasks, progress)
        each = [state.ahead[task.client] for task in tasks]
        counts = [self._counts(state, task) for task, ahead in zip(tasks, each, strict=True) if ahead.report.valid]
        rows = [ahead.update for ahead in each if ahead.report.valid]
        folded: State = {}
        if rows:
            stacked = stack(rows)
            folded = as_rows(stacked._replace(delta_D=stacked.delta_D * torch.tensor(counts)[:, None]))
        states = {ahead.report.client: ahead.state for ahead in each if ahead.state and ahead.report.valid}
        work = self._collude(state, tasks, Work(folded, [ahead.report for ahead in each], states), own)
        late = sum(state.coordinator.version - task.version for task in tasks) / len(tasks)
        return state, work, late

    def _train_ahead(self, state: RunState, tasks: tuple[Task, ...], progress: Progress) -> RunState:
        """Make sure that tasks are trained, and train with them those that will arrive next, whatever their version.

        Who arrives when is known here, so that clients are trained in stacks even if each makes a version of its own.
        """
        missing = [task for task in tasks if task.client not in state.ahead]
        if not missing:
            return state
        most = LOOK_AHEAD * max(1, self.engine.trainer.stack) - len(missing)
        soon = (j.task for j in state.journeys if not j.fails and j.task.client not in state.ahead)
        batch = missing + list(islice(soon, max(0, most)))
        work = self.engine.train(self._as_done(state, batch), state.sent, state.clients, progress)
        rows, number = rows_of(work.folded) if work.folded else None, 0
        found = dict(state.ahead)
        for report in work.reports:
            update = Update(state.params_D[:0], state.params_D[:0], {})
            if report.valid and rows is not None:
                one, number = rows.rows(number), number + 1  # cloned, since a view would keep all the others
                aux = {name: vector.clone() for name, vector in one.aux.items()}
                update = Update(one.delta_D.clone(), one.weight.clone(), aux)
            found[report.client] = Ahead(update, report, work.states.get(report.client, {}))
        return state._replace(ahead=found)

    def _collude(self, state: RunState, tasks: tuple[Task, ...], work: Work, own: Update | None) -> Work:
        """Let attackers who see every update, and know the rule, change their own."""
        job = self.job
        valid = [report for report in work.reports if report.valid]
        if job.attack is None or job.attack.collude is None or len(valid) < self.coordinator.policy.min_reports:
            return work  # too few for a commit: nothing is made of them

        def aggregate(updates: Update) -> Tensor:
            return aggregated(job, as_rows(updates), state.rule, own)[0].delta_D

        bad_C = torch.tensor([job.attacks(report.client, state.coordinator.version) for report in valid])
        known = knowledge(job, tasks[0], state.params_D)._replace(aggregate=aggregate)
        changed = job.attack.collude(rows_of(work.folded), bad_C, known)
        good_C = finite(changed)
        by_client = {report.client: bool(good) for report, good in zip(valid, good_C.tolist(), strict=True)}
        reports = [report._replace(valid=by_client.get(report.client, False)) for report in work.reports]
        return Work(as_rows(changed.rows(good_C)), reports, work.states)

    def _evaluate(self, number: int, state: RunState, *, last: bool) -> Round:
        """Measure what the plan asks for after this round; the last round is always measured.

        Where clients keep models of their own, those are measured of the clients that have taken part.
        """
        ask, last = self.plan.evaluation, last or number >= self.coordinator.rounds
        row: dict[str, Metrics] = {}
        confusion_KK = scores_C2 = None
        clients: list[int] | None = None
        asked = last or (ask.every > 0 and number % ask.every == 0)
        at_home = ask.clients_every > 0 and (last or number % ask.clients_every == 0)
        chosen = self._evaluated_clients(state) if at_home or (asked and self.job.kinds) else []
        own = {client: state.clients[client] for client in chosen} if self.job.kinds else {}
        if asked:
            if own:
                row["test"], confusion_KK, models_C2 = self.engine.evaluate_own(own)
                row["models_test"] = spread(models_C2[:, 0], models_C2[:, 1])
            else:
                row["test"], confusion_KK = self.engine.evaluate(state.params_D)
        if at_home:
            clients = chosen
            scores_C2 = self.engine.evaluate_clients(state.params_D, clients, own)
            row["clients_test"] = spread(scores_C2[:, 0], scores_C2[:, 1])
        return Round(row=row, confusion_KK=confusion_KK, clients=clients, scores_C2=scores_C2)

    def _evaluated_clients(self, state: RunState) -> list[int]:
        have_models = sorted(state.clients) if self.job.kinds else range(self.job.federation.num_clients)
        if len(have_models) <= self.plan.evaluation.max_clients:
            return list(have_models)
        rng = generator(self.plan.seed, "evaluated clients")
        picked = rng.choice(len(have_models), size=self.plan.evaluation.max_clients, replace=False)
        return [have_models[place] for place in sorted(picked.tolist())]


def _counters(machine: CoordinatorState) -> dict[str, int]:
    return {"failed": machine.failed, "rejected": machine.rejected, "abandoned": machine.abandoned}
