"""The finish of a round and of a run, for every driver.

`commit_round` goes from the state and what clients did to the next state, the metrics row, what happened, and the
reason to stop, if there is one. Nothing of it knows whether the clients were simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from atoll.commit.client_states import as_client_states
from atoll.commit.parts import RunParts
from atoll.commit.run_state import RunState
from atoll.commit.secure_sum import Added
from atoll.commit.versions import Fold
from atoll.core.coordinator import Abandon, Command, Committed, CoordinatorState, Policy, Reason
from atoll.core.events import (
    AttemptAbandoned,
    BudgetCharged,
    Evaluated,
    Event,
    NewClientsEvaluated,
    RoundCommitted,
    TasksSent,
)
from atoll.core.messages import Task, Update
from atoll.core.plan import ADAPT_STEPS, Plan, Stop
from atoll.core.seeds import generator
from atoll.engine.base import Engine
from atoll.train.exchange import Work
from atoll.train.job import broadcast_of
from atoll.train.metrics import Metrics, spread

MEASURES = ("test", "models_test", "clients_test", "shared_test")
"""The parts of a metrics row that say how good the model is."""


class RoundWork(NamedTuple):
    """What clients did for a round."""

    tasks: Sequence[Task]
    """The tasks that are to be committed, as they were done."""
    work: Work | None
    """Their updates, folded or as rows; None if nothing came of them."""
    own: Update | None = None
    """The server's own update, where the rule compares with it."""
    added: Added | None = None
    """What is known of a sum that was made in secret."""
    fold: Fold | None = None
    """Folds the updates of some of the clients again."""
    extras: Mapping[str, Any] = MappingProxyType({})
    """What the driver alone knows of the round, for its metrics row."""


class Outcome(NamedTuple):
    """What became of a round."""

    state: RunState
    committed: Committed | None
    """What the coordinator was told; None if the version must not count, and the run ends with the one before."""
    commands: Sequence[Command] = ()
    """What the coordinator wants, if nothing was committed."""
    row: dict[str, Any] | None = None
    """The metrics row of the new version; None if there is none."""
    reason: Reason | None = None
    """Why the run ends here, if it does."""
    events: tuple[Event, ...] = ()
    counted: tuple[Task, ...] = ()
    """The tasks whose updates are in the version."""
    overflowed: tuple[int, ...] = ()
    """Clients whose updates made a version overflow, which was made again without them."""


def commit_round(parts: RunParts, state: RunState, did: RoundWork, elapsed: Callable[[], float]) -> Outcome:
    """Make a version of what clients did, if that is enough, and finish the round.

    `state` is that in which the coordinator commits, and `elapsed` gives the seconds since the round began. A round is
    not counted that takes more bytes than are left, or makes a model that is not finite.
    """
    coordinator, policy, before = parts.coordinator, parts.coordinator.policy, state
    committing = state.coordinator.committing
    row: dict[str, Any] = {}
    committed, counted = Committed(0), frozenset[int]()
    if did.work is not None:
        state, row, committed, counted = parts.versions.settle(state, did.tasks, did.work, did.own, did.added, did.fold)
    refused = why_refused(parts.plan.stop, state)
    if refused is not None:
        return Outcome(forget(before, committing, policy), None, reason=refused)
    late = sum(state.coordinator.version - task.version for task in did.tasks) / max(1, len(did.tasks))
    machine, commands = coordinator.step(state.coordinator, committed)
    state = forget(state._replace(coordinator=machine), committing, policy)
    overflowed = tuple(row.get("overflowed", ()))
    if commands:
        return Outcome(state, committed, commands, overflowed=overflowed)
    row = row | {**did.extras, **({"staleness": late} if policy.overlaps_rounds else {})}
    state, row, evaluated, reason = _finished(parts, state, row, elapsed)
    return Outcome(
        state=state,
        committed=committed,
        row=row,
        reason=reason,
        events=(*_charged(parts, machine.attempt - 1), *_told(evaluated), RoundCommitted(row=row)),
        counted=tuple(task for task in committing if task.client in counted),
        overflowed=overflowed,
    )


def _finished(
    parts: RunParts, state: RunState, row: Mapping[str, Any], elapsed: Callable[[], float]
) -> tuple[RunState, dict[str, Any], Evaluated, Reason | None]:
    """Measure a version that counts, complete its row, and say which of the plan's limits it has reached.

    The last round is always measured; where privacy does not pay for another attempt, this is the last.
    """
    plan, guard, machine = parts.plan, parts.guard, state.coordinator
    counters = {"failed": machine.failed, "rejected": machine.rejected, "abandoned": machine.abandoned}
    row = {"round": machine.version, **row, **counters}
    if guard is not None:
        row = guard.public_row(row, machine.attempt)
    reason = why_stop(plan.stop, {**row, "seconds": state.seconds + elapsed()})
    last = machine.version >= parts.coordinator.rounds or reason is not None
    last = last or (guard is not None and not guard.allows(machine.attempt))
    evaluated = measured(plan, parts.engine, machine.version, state, last=last)
    took = elapsed()
    state = state._replace(seconds=state.seconds + took)
    times = {"round_seconds": round(took, 6), "seconds": round(state.seconds, 6)}
    whole = without_nan({**row, **times, **evaluated.metrics})
    return state, whole, evaluated, reason or why_stop(plan.stop, whole)


def measured(plan: Plan, engine: Engine, version: int, state: RunState, *, last: bool) -> Evaluated:
    """Measure what the plan asks for after this round; the last round is always measured.

    Where clients have models of their own, those are measured on clients' data, beside the shared one if there is one;
    if there is none, on the test set too, of the clients that have taken part. A mechanism's noise does not cover what
    clients keep, so that nothing is told of such models then.
    """
    ask, job = plan.evaluation, engine.job
    metrics: dict[str, Metrics] = {}
    charts: Mapping[str, Any] = {}
    scores_C2 = None
    covered = job.shares_model or job.mechanism is None or job.mechanism.test_noise
    measurable = len(job.federation.test_y) > 0
    asked = covered and measurable and (last or (ask.every > 0 and version % ask.every == 0))
    at_home = engine.holds_clients and ask.clients_every > 0 and (last or version % ask.clients_every == 0)
    chosen = _chosen(plan, engine, state) if at_home or (asked and not job.shares_model) else []
    own = as_client_states(state.clients).of(chosen) if job.personal else None
    if asked:
        if job.shares_model:
            metrics["test"], charts = engine.evaluate(state.params_D)
        elif own:
            metrics["test"], charts, models_C2 = engine.evaluate_own(state.params_D, own)
            metrics["models_test"] = _spread(engine, models_C2)
    if "fairness" in charts:
        metrics["fairness"] = {name: value for name, value in charts["fairness"].items() if isinstance(value, float)}
    if at_home and chosen:
        scores_C2 = engine.evaluate_clients(state.params_D, chosen, own)
        metrics["clients_test"] = _spread(engine, scores_C2)
        if own is not None and job.shares_model:
            metrics["shared_test"] = _spread(engine, engine.evaluate_clients(state.params_D, chosen))
    return Evaluated(
        version=version,
        metrics=metrics,
        charts=charts,
        clients=tuple(chosen) if at_home else (),
        scores_C2=scores_C2,
        main=job.measures.main if at_home else "accuracy",
    )


def _spread(engine: Engine, scores_C2: np.ndarray) -> Metrics:
    return spread(scores_C2[:, 0], scores_C2[:, 1], larger_is_better=engine.job.measures.larger_is_better)


def _chosen(plan: Plan, engine: Engine, state: RunState) -> list[int]:
    """Return the clients to measure: all but those who joined to attack, or as many as the plan allows, by seed."""
    job, added = engine.job, engine.job.federation.added  # the last clients
    taken_part = (client for client in state.clients if client not in added)
    have_models = range(added.start) if job.shares_model else sorted(taken_part)
    most = plan.evaluation.max_clients
    if len(have_models) <= most:
        return list(have_models)
    picked = generator(plan.seed, "evaluated clients").choice(len(have_models), size=most, replace=False)
    return [have_models[place] for place in sorted(picked.tolist())]


def forget(state: RunState, done: Iterable[Task], policy: Policy) -> RunState:
    """Drop what no client needs any more: finished tasks, and broadcasts of versions that nobody works on.

    A version that is yet to be improved keeps its broadcast, so that it is sent in one form however often it is tried.
    """
    machine = state.coordinator
    needed = {machine.version}
    if policy.overlaps_rounds:
        needed |= {task.version for task in machine.in_flight.values()} | {task.version for task in machine.arrived}
    sent = {version: broadcast for version, broadcast in state.sent.items() if version in needed}
    if not policy.overlaps_rounds:
        return state._replace(journeys=(), works={}, sent=sent)
    ahead, works = dict(state.ahead), dict(state.works)
    for task in done:
        ahead.pop(task.client, None)
        works.pop(task, None)
    return state._replace(works=works, sent=sent, ahead=ahead)


def is_spent(parts: RunParts, machine: CoordinatorState) -> bool:
    """Return whether there are rounds left for which the privacy budget does not pay."""
    guard = parts.guard
    return guard is not None and machine.version < parts.coordinator.rounds and not guard.allows(machine.attempt)


def send_tasks(parts: RunParts, machine_attempt: int, tasks: Sequence[Task]) -> tuple[Event, ...]:
    """Charge what is released by asking alone, and say who was asked."""
    guard = parts.guard
    hidden = guard is not None and guard.mechanism.hides_cohort
    clients = () if hidden else tuple(task.client for task in tasks)
    sent = TasksSent(version=tasks[0].version, attempt=machine_attempt, clients=clients)
    if guard is None or not guard.trusts_nobody:
        return (sent,)
    guard.charge(machine_attempt)
    return (sent, *_charged(parts, machine_attempt))


def abandon(parts: RunParts, command: Abandon) -> tuple[Event, ...]:
    """Charge an attempt of which nothing was made, and say so."""
    abandoned = AttemptAbandoned(attempt=command.attempt, reason=str(command.reason))
    if parts.guard is None:
        return (abandoned,)
    parts.guard.charge(command.attempt)
    return (*_charged(parts, command.attempt), abandoned)


def _charged(parts: RunParts, attempt: int) -> tuple[Event, ...]:
    if parts.guard is None:
        return ()
    spent = parts.guard.spent(attempt + 1)
    return (BudgetCharged(attempt=attempt, epsilon=spent.epsilon, delta=spent.delta),)


def _told(evaluated: Evaluated) -> tuple[Event, ...]:
    return (evaluated,) if evaluated.metrics else ()


def finish_run(
    parts: RunParts, state: RunState, reason: Reason, row: Mapping[str, Any] | None
) -> tuple[Reason, tuple[Event, ...]]:
    """Return why a run ends whose last row is this, and what is measured for its end."""
    events = measured_again(parts, state, row)
    row = next((event.row for event in events if isinstance(event, RoundCommitted)), row)
    return end_reason(reason, row), (*events, *measured_new(parts, state))


def measured_new(parts: RunParts, state: RunState) -> tuple[Event, ...]:
    """Measure clients that took no part in training, after steps of adaptation, if there are any."""
    engine, job = parts.engine, parts.engine.job
    if not job.federation.new_clients:
        return ()
    steps = parts.plan.evaluation.adapt_steps or ADAPT_STEPS
    scores_SC2 = engine.evaluate_new(broadcast_of(job, state.params_D, state.server), steps)
    figures = {num: _spread(engine, scores_C2) for num, scores_C2 in zip(steps, scores_SC2, strict=True)}
    return (NewClientsEvaluated(version=state.coordinator.version, figures=figures, main=job.measures.main),)


def end_reason(reason: Reason, row: Mapping[str, Any] | None) -> Reason:
    """Return why a run ends whose last row is this: a model that cannot be measured has diverged, whatever ended it."""
    if row is None or reason is Reason.INTERRUPTED:
        return reason
    losses = [row[name]["loss"] for name in MEASURES if "loss" in row.get(name, {})]
    losses += [row["train_loss"]] if "train_loss" in row else []
    return reason if _is_finite(losses) else Reason.DIVERGED


def measured_again(parts: RunParts, state: RunState, row: Mapping[str, Any] | None) -> tuple[Event, ...]:
    """Measure the last round if its row says that it has not been; the row with what was found comes last."""
    if row is None or "test" in row:
        return ()
    evaluated = measured(parts.plan, parts.engine, row["round"], state, last=True)
    return (evaluated, RoundCommitted(row=without_nan({**row, **evaluated.metrics}), again=True))


def why_refused(stop: Stop, state: RunState) -> Reason | None:
    """Return why a new version must not count, if so: it is not finite, or took more bytes than the plan allows."""
    params_D = state.params_D
    if not (bool(params_D.sum().isfinite()) or bool(params_D.isfinite().all())):  # a finite sum needs no closer look
        return Reason.DIVERGED
    if stop.bytes is not None and state.bytes_up + state.bytes_down > stop.bytes:
        return Reason.BYTES
    return None


def why_stop(stop: Stop, row: Mapping[str, Any]) -> Reason | None:
    """Return which of a plan's limits a round has reached, if any."""
    spent: dict[Reason, tuple[float | None, float]] = {
        Reason.TARGET: (stop.accuracy, row.get("test", {}).get("accuracy") or 0.0),
        Reason.BYTES: (stop.bytes, row.get("bytes_up", 0) + row.get("bytes_down", 0)),
        Reason.SAMPLES: (stop.samples, row.get("samples_trained", 0)),
        Reason.SIMULATED_SECONDS: (stop.simulated_seconds, row.get("simulated_seconds", 0.0)),
        Reason.SECONDS: (stop.seconds, row["seconds"]),
    }
    return next((reason for reason, (most, now) in spent.items() if most is not None and now >= most), None)


def without_nan(value: Any) -> Any:
    """Replace numbers that are not finite by None, in tables and lists too: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    return [without_nan(each) for each in value] if isinstance(value, list | tuple) else value


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in nested tables are there and finite; a None stands for one that was not."""
    if isinstance(value, Mapping):
        return _is_finite(list(value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return value is not None and (not isinstance(value, float) or math.isfinite(value))
