"""The round machine of a plan."""

from __future__ import annotations

from atoll.core.aggregator import Aggregator
from atoll.core.coordinator import Coordinator, CoordinatorState, Policy
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.core.sampler import Sampler
from atoll.train.federation import Federation
from atoll.train.secure import check_cohort


def build_coordinator(plan: Plan, federation: Federation) -> Coordinator:
    """The round machine of a plan; a cohort that cannot be had, or is too small for the rule, is refused here."""
    policy: Policy = plan.policy.build("rounds")
    goal = policy.goal(federation.num_clients)
    aggregator: Aggregator = plan.aggregator.build("aggregators", seed=plan.seed)
    asked = policy.num_wanted(CoordinatorState(), federation.num_clients)
    if plan.secagg is not None:  # the rule then sees the sums of groups, not updates
        check_cohort(plan.secagg, asked)
        aggregator = aggregator._replace(min_updates=1)
    if goal < aggregator.min_updates:
        raise PlanError(
            f"{aggregator.needs}, but {goal} make a version: lower f, or raise policy.size to {aggregator.min_updates}"
        )
    policy = policy._replace(min_reports=max(policy.min_reports, aggregator.min_updates))
    sampler: Sampler = plan.sampler.build("rounds.samplers")
    if sampler.draws_size and asked != goal:
        raise PlanError(
            f"{plan.sampler.name} draws how many clients are asked, and all who answer count: "
            "leave policy.over_selection out, or use another sampler"
        )
    return Coordinator(
        policy=policy,
        sampler=sampler,
        num_clients=federation.num_clients,
        rounds=plan.rounds,
        seed=plan.seed,
        sizes=federation.partition.sizes,
    )
