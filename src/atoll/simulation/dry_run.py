"""A plan built as for a simulation, and rehearsed, but not run."""

from __future__ import annotations

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import guarded
from atoll.commit.rehearsal import rehearse_round, rehearse_training
from atoll.core.coordinator import Coordinator
from atoll.core.plan import Plan
from atoll.privacy.ledger import Ledger
from atoll.simulation.devices import build_devices
from atoll.split.rehearsal import rehearse_cut
from atoll.train.build import build_job
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job


def dry_run(plan: Plan, federation: Federation | None = None) -> tuple[Job, Coordinator]:
    """Build all parts of a plan, apply every rule and rehearse a round; raise a PlanError for what does not fit.

    `federation` is that of the plan, if it has been built.
    """
    federation = federation or build_federation(plan)
    build_devices(plan)
    job, coordinator = build_job(plan, federation), build_coordinator(plan, federation)
    if plan.privacy is not None:
        job, coordinator, _ = guarded(plan, job, coordinator, Ledger(job.secret))
    rehearse_round(plan, job, coordinator)
    rehearse_training(job)
    if plan.split is not None:
        rehearse_cut(plan, job)
    return job, coordinator
