"""The end of a round, for every driver: whether it counts, what is measured and written of it, and why a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from atoll.commit.guard import Guard
from atoll.commit.measure import measured
from atoll.commit.run_state import Round, RunState, why_stop
from atoll.core.coordinator import Coordinator, Reason
from atoll.core.plan import Plan, Stop
from atoll.engine.base import Engine

MEASURES = ("train_loss", "test", "models_test", "clients_test")
"""The parts of a metrics row that say how good the model is."""


class Finished(NamedTuple):
    """A round that counts, with the time that it took."""

    state: RunState
    round: Round
    reason: Reason | None
    """Which of the plan's limits it has reached, if any."""


def why_refused(stop: Stop, state: RunState) -> Reason | None:
    """Return why a new version must not count, if so: it is not finite, or took more bytes than the plan allows."""
    params_D = state.params_D
    if not (bool(params_D.sum().isfinite()) or bool(params_D.isfinite().all())):  # a finite sum needs no closer look
        return Reason.DIVERGED
    if stop.bytes is not None and state.bytes_up + state.bytes_down > stop.bytes:
        return Reason.BYTES
    return None


def finish_round(
    plan: Plan,
    engine: Engine,
    coordinator: Coordinator,
    guard: Guard | None,
    state: RunState,
    row: Mapping[str, Any],
    elapsed: Callable[[], float],
) -> Finished:
    """Measure a version that counts, and complete its metrics row; `elapsed` gives the seconds since the round began.

    `state` is that after the commit, and `row` what was said of it when the version was made. The last round is always
    measured; where privacy does not pay for another attempt, this is the last.
    """
    machine = state.coordinator
    counters = {"failed": machine.failed, "rejected": machine.rejected, "abandoned": machine.abandoned}
    row = {"round": machine.version, **row, **counters}
    if guard is not None:
        row = guard.public_row(row, machine.attempt)
    reason = why_stop(plan.stop, {**row, "seconds": state.seconds + elapsed()})
    last = machine.version >= coordinator.rounds or reason is not None
    last = last or (guard is not None and not guard.allows(machine.attempt))
    found = measured(plan, engine, machine.version, state, last=last)
    took = elapsed()
    state = state._replace(seconds=state.seconds + took)
    times = {"round_seconds": round(took, 6), "seconds": round(state.seconds, 6)}
    whole = without_nan({**row, **times, **found.row})
    return Finished(state, replace(found, row=whole), reason or why_stop(plan.stop, whole))


def measured_again(plan: Plan, engine: Engine, state: RunState, row: Mapping[str, Any] | None) -> Round | None:
    """Measure the last round that counts if it has not been: nobody knew that it was the last."""
    if row is None or "test" in row:
        return None
    found = measured(plan, engine, row["round"], state, last=True)
    return replace(found, row=without_nan({**row, **found.row}))


def end_reason(reason: Reason, row: Mapping[str, Any] | None) -> Reason:
    """Return why a run ends whose last row is this: a model that cannot be measured has diverged, whatever ended it."""
    if row is None or reason is Reason.INTERRUPTED:
        return reason
    return reason if _is_finite([row[name] for name in MEASURES if name in row]) else Reason.DIVERGED


def without_nan(value: Any) -> Any:
    """Replace numbers that are not finite by None, in tables and lists too: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_finite(value: Any) -> bool:
    """Whether all numbers in nested tables are there and finite; a None stands for one that was not."""
    if isinstance(value, Mapping):
        return _is_finite(list(value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return value is not None and (not isinstance(value, float) or math.isfinite(value))
