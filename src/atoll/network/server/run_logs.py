"""What the log says of a run that is built: whose samples are cut, and what nobody measures."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.network.server.monitoring import log
from atoll.network.server.runs import Run, WaitingRun


def log_capped(run: WaitingRun | Run, capped: Mapping[int, tuple[int, int]]) -> None:
    """Log the clients that are credited with fewer samples than they state."""
    for client, (stated, counts) in capped.items():
        why = f"says {stated} samples, counts as {counts}: atoll clients approve NAME --samples N agrees to more"
        log("cut", run=run.name, client=client, why=why)


def log_unmeasured(run: Run) -> None:
    """Log what the server cannot measure, as it has no model for all clients."""
    job, ask = run.parts.job, run.plan.evaluation
    if job.shares_model or not len(job.federation.test_y):
        return
    kept = sum(slot.size for slot in job.spec.kept)
    has = (
        f"lacks {kept:,} parameters that clients keep" if kept else f"has a model for each of {job.work.copies} groups"
    )
    at_clients = (
        "clients measure theirs" if ask.clients_every else "evaluation.clients_every lets clients measure theirs"
    )
    log(
        "unmeasured",
        run=run.name,
        why=f"the server {has}, so that no version is measured on its test set; {at_clients}",
    )
