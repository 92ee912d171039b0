"""What the best of a sweep is chosen by, measured in the process of each run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.api import Result
from atoll.commit.run_state import read_fields
from atoll.core.errors import PlanError, RunError
from atoll.core.plan import Plan
from atoll.held_out import Kind, measurable, of_those_that_took_part, own_sums, shared_sums
from atoll.report.figures import write_whole
from atoll.report.record import CHECKPOINT
from atoll.report.sweep import ChosenOn, finite
from atoll.train.build import build_job
from atoll.train.job import Job

FILE = "sweep.json"
"""Where a run directory holds what was measured."""
KINDS: dict[ChosenOn, Kind] = {"validation": "validation", "holdout": "held-out"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run came to."""

    metric: str
    larger_is_better: bool
    figure: float | None
    """The main figure on the samples that the best is chosen on; None where it is not defined or not finite."""
    test: float | None
    rounds: int
    reason: str
    bytes_up: int
    seconds: float


def chosen_on(plan: Plan) -> ChosenOn:
    """Return what the best is chosen on: samples that clients set apart, where the plan has any, else the test set."""
    if plan.evaluation.validation:
        return "validation"
    return "holdout" if plan.evaluation.holdout else "test"


def check_samples(plan: Plan, job: Job) -> None:
    """Refuse a plan whose clients are too small to set a sample apart."""
    by = chosen_on(plan)
    if by != "test" and not measurable(job, plan.evaluation.max_clients, KINDS[by]).clients:
        share = getattr(plan.evaluation, by)
        raise PlanError(
            f"evaluation.{by} is {share}, but no client has so many samples that one is set apart, and nothing can be "
            f"chosen by: raise evaluation.{by}, or use fewer clients"
        )


def measure(result: Result) -> None:
    """Measure the model, or the models that clients keep, of a run that has ended; write it to its directory.

    Sums of all measured clients are added up, so that every sample counts alike, as on a test set.
    """
    assert result.path is not None
    job, by = build_job(result.plan), chosen_on(result.plan)
    fields = read_fields(result.path / CHECKPOINT)
    test = finite(result.test.get(job.measures.main))
    measured = Measured(
        metric=job.measures.main,
        larger_is_better=job.measures.larger_is_better,
        figure=test if by == "test" else _figure(result, job, KINDS[by]),
        test=test,
        rounds=result.history[-1]["round"] if result.history else 0,
        reason=result.reason,
        bytes_up=fields["bytes_up"],
        seconds=fields["seconds"],
    )
    write_whole(result.path / FILE, msgspec.json.encode(measured))


def _figure(result: Result, job: Job, kind: Kind) -> float | None:
    assert result.path is not None
    able = measurable(job, result.plan.evaluation.max_clients, kind).clients
    clients = of_those_that_took_part(able, read_fields(result.path / CHECKPOINT)) if job.personal else able
    if not clients:
        return None
    if job.personal:
        sums = list(own_sums(job, result.models, clients, kind))
    else:
        sums = list(shared_sums(job, result.params_D, clients, kind))
    main, _ = job.measures.main_and_loss(job.measures.merge(sums))
    return finite(main)


def read_measured(path: Path) -> Measured:
    """Return what was measured of the run in this directory."""
    try:
        return msgspec.json.decode((path / FILE).read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"{path / FILE} cannot be read ({error}): remove {path} and start again") from error
