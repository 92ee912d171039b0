"""The driver of a simulated federation: feeds the coordinator, lets an engine do the work, makes the versions.

Shapes: C clients, D parameters.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from atoll.commit.finish import (
    Outcome,
    RoundWork,
    abandon,
    commit_round,
    finish_run,
    forget,
    is_spent,
    send_tasks,
    why_stop,
)
from atoll.commit.guard import must_fit
from atoll.commit.parts import RunParts
from atoll.commit.run_state import Ahead, Journey, RunState, first_state
from atoll.commit.secure_sum import Added
from atoll.commit.server_step import aggregated
from atoll.commit.versions import valid_of
from atoll.core.aggregator import as_rows, rows_of
from atoll.core.coordinator import (
    Abandon,
    Arrived,
    Begin,
    Commit,
    Deadline,
    Failed,
    Finish,
    Phase,
    Reason,
    Send,
)
from atoll.core.coordinator import Event as MachineEvent
from atoll.core.devices import INSTANT, Devices, Load, Trip
from atoll.core.eligibility import ANYBODY
from atoll.core.errors import TrainingError
from atoll.core.events import ClientReported, Event, Reader, unread
from atoll.core.messages import State, Task, Update
from atoll.core.seeds import generator
from atoll.engine.base import Progress
from atoll.simulation.secure_round import Sent, add_in_secret, counted, fates
from atoll.train.exchange import Work, acceptable
from atoll.train.loop import knowledge

LOOK_AHEAD = 4
"""Where few updates make a version, so many stacks of clients are trained ahead of their arrival."""
PATIENCE, MOST_PATIENCE = 60.0, 3600.0
"""Simulated seconds until clients are asked again after an attempt that came to nothing, and after many of them."""
SHORT_WAITS = 50
"""After so many attempts in a row that came to nothing the wait is doubled each time: a day has quiet hours."""


class Simulation:
    """Runs a plan's rounds; iterate over `rounds()` and look at `state` and `reason`."""

    def __init__(
        self,
        parts: RunParts,
        state: RunState | None = None,
        devices: Devices = INSTANT,
        last_row: dict[str, Any] | None = None,
    ) -> None:
        must_fit(parts.job, parts.guard)
        self.parts, self.devices = parts, devices
        self.plan, self.job, self.engine = parts.plan, parts.job, parts.engine
        self.coordinator, self.guard, self.versions = parts.coordinator, parts.guard, parts.versions
        self._all_eligible = parts.plan.eligibility == ANYBODY
        self.state = state or first_state(parts.job, parts.guard)
        self.last_row = last_row
        """The metrics row of the last round; whoever gives a state gives this too."""
        self.reason: Reason | None = why_stop(parts.plan.stop, last_row) if last_row else None

    def rounds(
        self, read: Reader = unread, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[tuple[Event, ...]]:
        """Yield what happened after every commit, when `state` is whole and may be written down.

        The last round is yielded again if it has not been measured: nobody knew that it was the last. `read` is given
        what happens in between, as it does.
        """
        while self.reason is None:
            started = clock()
            if is_spent(self.parts, self.state.coordinator):
                self.reason = Reason.PRIVACY
                break
            outcome = self._attempt(self.state, read, lambda started=started: clock() - started)  # type: ignore[misc]
            if outcome.row is not None:
                self.state, self.last_row = outcome.state, outcome.row
                yield outcome.events
            elif outcome.reason is None:
                self.state = outcome.state._replace(seconds=outcome.state.seconds + clock() - started)
            self.reason = outcome.reason
        self.reason, events = finish_run(self.parts, self.state, self.reason, self.last_row)
        if events:
            yield events

    def _attempt(self, state: RunState, read: Reader, elapsed: Callable[[], float]) -> Outcome:
        """Follow the coordinator until a round is committed, the attempt is abandoned, or the run ends.

        `state` is a value: whatever interrupts this, the driver still holds the last commit.
        """
        began, asked = state.clock, tuple[Task, ...]()
        event: MachineEvent = self._begin(state)
        while True:
            machine, commands = self.coordinator.step(state.coordinator, event)
            state = state._replace(coordinator=machine)
            for command in commands:
                match command:
                    case Send(tasks):
                        state, asked = self._send(state, tasks, read), asked + tasks
                    case Commit(tasks):
                        outcome = self._commit(state, tasks, asked, read, elapsed)
                        ended = [each for each in outcome.commands if isinstance(each, Abandon)]
                        return self._abandon(outcome.state, ended[0], read) if ended else outcome
                    case Abandon():
                        return self._abandon(forget(state, (), self.coordinator.policy), command, read)
                    case Finish(reason):
                        return Outcome(state, None, reason=reason)
            if machine.phase is Phase.READY:  # somebody was lost, and another is asked in place
                event = self._begin(state)
            else:
                state, event = self._next(state, began)

    def _abandon(self, state: RunState, command: Abandon, read: Reader) -> Outcome:
        for event in abandon(self.parts, command):
            read(event)
        return Outcome(self._wait(state), None)

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
        if self.devices is INSTANT or state.coordinator.in_flight:
            return state
        doubled = max(0, state.coordinator.abandoned_in_a_row - SHORT_WAITS)
        return state._replace(clock=state.clock + min(MOST_PATIENCE, PATIENCE * 2.0**doubled))

    def _send(self, state: RunState, tasks: tuple[Task, ...], read: Reader) -> RunState:
        """Set tasks on their way."""
        machine = state.coordinator
        for event in send_tasks(self.parts, machine.attempt, tasks):
            read(event)
        if machine.version not in state.sent:
            state, _ = self.versions.broadcast(state)
        costs = [0] * len(tasks)
        if not self.engine.counts_traffic:
            state, costs = self.versions.count_down(state, [task.client for task in tasks])
        pairs = list(zip(tasks, self._trips(state, tasks, costs), strict=True))
        journeys = list(state.journeys)
        for task, trip in pairs:
            insort(journeys, Journey(task, state.clock + trip.seconds, trip.fails), key=attrgetter("ends"))
        return state._replace(
            journeys=tuple(journeys),
            works={**state.works, **{task: trip.work for task, trip in pairs if trip.work != 1}},
        )

    def _trips(self, state: RunState, tasks: tuple[Task, ...], costs: list[int]) -> list[Trip]:
        """Return how long tasks take and which are lost, if `costs` are the bytes that their clients are sent."""
        if self.devices is INSTANT:
            return [Trip(0.0)] * len(tasks)
        loads = [
            Load(task.client, self._passes(state, task), down, state.upload)
            for task, down in zip(tasks, costs, strict=True)
        ]
        attempt = state.coordinator.attempt
        seeded = generator(self.plan.seed, "trips", attempt)
        return self.devices.trips(loads, self.guard.rng("trips", attempt) if self.guard else seeded)

    def _next(self, state: RunState, began: float) -> tuple[RunState, MachineEvent]:
        """What happens next: those tasks end that end first, or the attempt's time does.

        Where clients work on after a commit, nobody is asked until the next commit or loss, so that all who arrive
        before that may arrive in one event.
        """
        first, policy = state.journeys[0], self.coordinator.policy
        if policy.deadline is not None and first.ends > began + policy.deadline:
            return state._replace(clock=began + policy.deadline), Deadline(state.coordinator.attempt)
        if policy.overlaps_rounds:
            room = policy.goal(self.coordinator.num_clients) - len(state.coordinator.arrived)
            arriving = takewhile(lambda journey: not journey.fails, state.journeys)
            together = state.journeys[:1] if first.fails else tuple(islice(arriving, room))
        else:
            together = tuple(takewhile(lambda journey: journey[1:] == first[1:], state.journeys))
        ended = tuple(journey.task for journey in together)
        state = state._replace(clock=together[-1].ends, journeys=state.journeys[len(ended) :])
        if not first.fails:
            return state, Arrived(ended)
        lost, clients = set(ended), {task.client for task in ended}
        works = {task: work for task, work in state.works.items() if task not in lost}
        heard = {
            client: num for client, num in state.heard.items() if client not in clients
        }  # who knows what they heard
        return state._replace(heard=heard, works=works), Failed(ended)

    def _commit(
        self,
        state: RunState,
        tasks: tuple[Task, ...],
        asked: tuple[Task, ...],
        read: Reader,
        elapsed: Callable[[], float],
    ) -> Outcome:
        """Train the clients whose work counts, and finish the round."""
        job, policy = self.job, self.coordinator.policy
        own = self.versions.own_update(state)
        lost: dict[int, str] = {}
        if job.secure is not None:
            lost = fates(job, asked, tasks)
            tasks = counted(job, tasks, lost)
            if not tasks:
                return commit_round(self.parts, state, RoundWork((), None), elapsed)
        expected = policy.goal(self.coordinator.num_clients)

        def trained(num: int) -> None:
            read(ClientReported(num_done=num, num_expected=expected))

        state, work = self._train(state, tasks, own, trained)
        if not valid_of(work) and policy.min_reports > 0:
            self._must_be_an_attack(state, tasks)
        added: Added | None = None
        if job.secure is not None and valid_of(work):
            added, work = self._add_in_secret(state, asked, lost, work)
        done = self._as_done(state, tasks)

        def fold(clients: Collection[int]) -> State:
            some = [each for each in done if each.client in clients]
            return self.engine.train(some, state.sent, state.clients).folded

        state, extras = self._counted(state, work)
        return commit_round(self.parts, state, RoundWork(done, work, own, added, fold, extras), elapsed)

    def _counted(self, state: RunState, work: Work) -> tuple[RunState, dict[str, Any]]:
        """Count what the engine says was sent, and return what the metrics row says of time and messages."""
        traffic, extras = work.traffic, dict[str, Any]()
        if traffic is not None:
            clock = state.clock + (traffic.seconds or 0.0)
            state = state._replace(bytes_down=state.bytes_down + traffic.bytes_down, clock=clock)
            extras = {name: (self.last_row or {}).get(name, 0) + num for name, num in traffic.counts.items()}
        if self.devices is not INSTANT or (traffic is not None and traffic.seconds is not None):
            extras["simulated_seconds"] = round(state.clock, 6)
        return state, extras

    def _must_be_an_attack(self, state: RunState, tasks: tuple[Task, ...]) -> None:
        """Bad clients must not end a run; honest ones who all send NaN should."""
        version = state.coordinator.version
        attacked = any(self.job.attacks(task.client, task.version) for task in tasks)
        if not attacked and not self.coordinator.policy.overlaps_rounds:
            raise TrainingError(
                f"round {version + 1}: all {len(tasks)} updates hold NaN or Inf, or exceed server.max_norm: "
                f"lower local.lr (now {self.job.lr_of(version):g}), take fewer local steps, or check data and model"
            )

    def _add_in_secret(
        self, state: RunState, asked: tuple[Task, ...], lost: dict[int, str], work: Work
    ) -> tuple[Added, Work]:
        """Let clients add their updates in secret; what comes of it has a row for each group in place of each client.

        Those who sent NaN or Inf refuse to add it, and stay invalid; of a group that has no sum nothing is known.
        """
        valid, rows = valid_of(work), rows_of(work.folded)
        sent = {report.client: Sent(rows.rows(number), report) for number, report in enumerate(valid)}
        added = add_in_secret(self.job, self.plan.identity(), state.params_D, asked, sent, lost)
        reports = [report for report in work.reports if not report.valid or report.client in added.clients]
        states = {client: kept for client, kept in work.states.items() if client in added.clients}
        return added, Work(added.folded or {}, reports, states)

    def _passes(self, state: RunState, task: Task) -> int:
        return self.job.num_passes(task, first=task.client not in state.clients)

    def _as_done(self, state: RunState, tasks: Iterable[Task]) -> list[Task]:
        """The tasks with as much of their work as there was time for."""
        done = [task._replace(work=state.works[task]) if task in state.works else task for task in tasks]
        return done if self.guard is None else self.guard.orders(done, state.rule)

    def _train(
        self, state: RunState, tasks: tuple[Task, ...], own: Update | None, progress: Progress
    ) -> tuple[RunState, Work]:
        """Train tasks that have arrived, and fold their updates."""
        if not self.coordinator.policy.overlaps_rounds:
            done = self.engine.train(self._as_done(state, tasks), state.sent, state.clients, progress)
            return state, self._collude(state, tasks, done, own)
        state = self._train_ahead(state, tasks, progress)
        each = [state.ahead[task.client] for task in tasks]
        pairs = zip(tasks, each, strict=True)
        folded = self.versions.late_rows(state, [(task, ahead.update) for task, ahead in pairs if ahead.report.valid])
        states = {ahead.report.client: ahead.state for ahead in each if ahead.state and ahead.report.valid}
        return state, self._collude(state, tasks, Work(folded, [ahead.report for ahead in each], states), own)

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
        known = knowledge(job, tasks[0], job.trainable(state.params_D))
        known = known._replace(aggregate=aggregate, rotation_equivariant=job.aggregator.rotation_equivariant)
        changed = job.attack.collude(rows_of(work.folded), bad_C, known)
        of_client = {task.client: task for task in tasks}
        good_C = acceptable(job, [of_client[report.client] for report in valid], changed)
        by_client = {report.client: bool(good) for report, good in zip(valid, good_C.tolist(), strict=True)}
        reports = [report._replace(valid=by_client.get(report.client, False)) for report in work.reports]
        return Work(as_rows(changed.rows(good_C)), reports, work.states)
