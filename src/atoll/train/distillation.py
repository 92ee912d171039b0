"""What a plan must give to algorithms that distil, and what it cannot ask of them."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm
from atoll.core.coordinator import Policy
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.train.federation import Federation

EXAMPLE = 'e.g. public = {name = "held_out", fraction = 0.05}, or the name of a data set of the same shape'


def check_distillation(plan: Plan, algorithm: Algorithm, federation: Federation, policy: Policy) -> None:
    """Refuse plans whose algorithm lacks what it learns from, or would get what cannot be right."""
    name = plan.algorithm.name
    if algorithm.needs_public and federation.public is None:
        raise PlanError(f"{name} learns from public samples, and the plan has none: set public, {EXAMPLE}")
    if algorithm.needs_updates and policy.keeps_tasks:
        raise PlanError(
            f"{name} needs a round's updates to start from one version, but with policy '{plan.policy.name}' they "
            'start from several: set policy = "cohort"'
        )
    if algorithm.needs_updates and algorithm.needs_public and plan.local.buffers == "local":
        raise PlanError(
            f"{name} runs the clients' models on the server, which lacks batch-norm statistics that stay with the "
            'clients: set local.buffers = "average"'
        )
