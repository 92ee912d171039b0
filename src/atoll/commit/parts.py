"""What a run is driven with, built once from a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import Guard, guarded
from atoll.commit.rehearsal import rehearse_round
from atoll.commit.versions import Versions
from atoll.core.coordinator import Coordinator
from atoll.core.defence import defences_of
from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.engine.base import Engine
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import fresh_secret
from atoll.train.build import build_job, test_secret
from atoll.train.federation import Federation
from atoll.train.job import Job


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The built parts of a plan that both drivers need from the first round to the last."""

    plan: Plan
    job: Job
    coordinator: Coordinator
    guard: Guard | None
    """Charges and limits a private run; None for any other."""
    engine: Engine

    @cached_property
    def versions(self) -> Versions:
        """What makes versions of clients' work."""
        return Versions(self.coordinator, self.engine.trainer, self.guard)


def build_parts(
    plan: Plan,
    federation: Federation,
    ledger: Ledger | None,
    engine: Callable[[Job, Coordinator], Engine],
    *,
    lighten: Callable[[Job], Job] | None = None,
) -> RunParts:
    """Build a plan for a federation, rehearse a round of it, and make its engine; what cannot be right is refused.

    `lighten` takes from the built job what the driver keeps elsewhere.
    """
    coordinator = build_coordinator(plan, federation)
    job = build_job(plan, federation, secret=ledger.secret if ledger else None)
    job = job if lighten is None else lighten(job)
    guard = None
    if plan.privacy is not None:
        job, coordinator, guard = guarded(plan, job, coordinator, ledger or Ledger(job.secret))
    rehearse_round(plan, job, coordinator)
    return RunParts(plan=plan, job=job, coordinator=coordinator, guard=guard, engine=engine(job, coordinator))


def open_ledger(plan: Plan, path: Path | None, *, begun: bool, fingerprint: object = None) -> Ledger | None:
    """Open the privacy ledger of a run, or begin one if the run has not begun; None if the plan needs no secret.

    Defences of split learning that draw noise take their secret from it, and charge nothing. Without a path it is kept
    in memory. `fingerprint` is what the run wrote down of its ledger when it began, if it did.
    """
    drawing = [each for each in defences_of(plan) if each.draws]
    if plan.privacy is None and not drawing:
        return None
    for_test = plan.privacy is not None and bool(plan.privacy.options.get("test_noise"))
    secret = test_secret(plan.seed) if for_test or any(each.test_noise for each in drawing) else fresh_secret()
    if path is None:
        return Ledger(secret)
    if path.exists():
        ledger = Ledger.read(path, plan.identity())
        if fingerprint is not None:
            ledger.check_owner(fingerprint)
        return ledger
    if begun:
        raise RunError(
            f"{path} is gone: without its privacy ledger nobody knows what the run has spent, so that it cannot go on; "
            "restore it, or start another run, whose budget adds to what this one has spent"
        )
    return Ledger.begin(secret, plan.identity(), path)
