"""From a plan to the things that run it."""

from __future__ import annotations

from atoll.core.coordinator import Coordinator, CoordinatorState, Policy
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.engine.base import Engine
from atoll.train.federation import Federation
from atoll.train.job import Job


def build_coordinator(plan: Plan, federation: Federation) -> Coordinator:
    """The round machine of a plan; a cohort that cannot be had is refused here."""
    policy: Policy = plan.policy.build("rounds")
    policy.goal(federation.num_clients)
    return Coordinator(
        policy=policy,
        sampler=plan.sampler.build("rounds.samplers"),
        num_clients=federation.num_clients,
        rounds=plan.rounds,
        seed=plan.seed,
        sizes=federation.partition.sizes,
    )


def build_engine(part: Part, job: Job, coordinator: Coordinator, done: int = 0) -> Engine:
    """The engine of a plan, told how many clients are trained between two commits and how many rounds are left."""
    asked = coordinator.policy.num_wanted(CoordinatorState(), coordinator.num_clients)
    cohort = min(asked, coordinator.policy.goal(coordinator.num_clients))
    engine: Engine = part.build("engine", job, cohort=cohort, rounds=coordinator.rounds - done)
    return engine
