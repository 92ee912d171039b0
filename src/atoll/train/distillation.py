"""What a plan must give to algorithms that distil, and what it cannot ask of them."""

from __future__ import annotations

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm
from atoll.core.coordinator import Policy
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.core.transform import Chain, no_memory
from atoll.train.federation import Federation

EXAMPLE = 'e.g. public = {name = "held_out", fraction = 0.05}, or the name of a data set of the same shape'


def check_public(plan: Plan, algorithm: Algorithm, federation: Federation, policy: Policy) -> None:
    """Refuse a plan that lacks the public samples which its algorithm learns from, or uses them in the wrong rounds."""
    name = plan.algorithm.name
    if algorithm.needs_public and federation.public is None:
        raise PlanError(f"{name} learns from public samples, and the plan has none: set public, {EXAMPLE}")
    if (algorithm.needs_updates or algorithm.work is not None) and policy.overlaps_rounds:
        raise PlanError(
            f"{name} needs a round's updates to start from one version, but with policy '{plan.policy.name}' they "
            'start from several: set policy = "cohort"'
        )
    if algorithm.needs_public and plan.local.buffers == "local":
        why = (
            "runs the clients' models on the server, which lacks batch-norm statistics that stay with the clients"
            if algorithm.work is None
            else "leaves batch-norm statistics with the clients, as all of their models"
        )
        raise PlanError(f'{name} {why}: leave local.buffers out, or set it to "average"')


def check_models(
    plan: Plan, algorithm: Algorithm, federation: Federation, aggregator: Aggregator, uplink: Chain
) -> None:
    """Refuse several models where one is averaged, and what makes no sense of class scores."""
    name = plan.algorithm.name
    if algorithm.work is None:
        if plan.models is not None:
            raise PlanError(f"{name} averages parameters, so that all clients need one model: set model, not models")
        return
    if plan.server.lr not in (None, 1.0):
        raise PlanError(f"{name} replaces one round's consensus by the next: leave server.lr ({plan.server.lr}) out")
    if aggregator.unit_steps:
        raise PlanError(f"{plan.aggregator.name} gives votes, which are no class scores: use mean or median")
    assert federation.public is not None
    num_public = len(federation.public.x)
    drawn_anew = algorithm.work.options["samples"] < num_public
    if drawn_anew and any(step.init is not no_memory for step in uplink.transforms):
        raise PlanError(
            "error feedback would add what was left out of one round's scores to the scores of other samples: set "
            f"error_feedback = false, or {name}.samples to at least {num_public}, so that every round takes them all"
        )
