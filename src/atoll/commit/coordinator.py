"""The round machine of a plan."""

from __future__ import annotations

from atoll.core.aggregator import Aggregator
from atoll.core.coordinator import Coordinator, Policy
from atoll.core.plan import Plan
from atoll.core.sampler import Sampler
from atoll.train.federation import Federation


def build_coordinator(plan: Plan, federation: Federation) -> Coordinator:
    """Build the round machine of a plan."""
    policy: Policy = plan.policy.build("rounds")
    aggregator: Aggregator = plan.aggregator.build("aggregators", seed=plan.seed)
    if plan.secagg is None:  # else the rule sees the sums of groups, not updates
        parties = () if plan.split is None else plan.split.parties or ()  # every step needs all of them
        policy = policy._replace(min_reports=max(policy.min_reports, aggregator.min_updates, len(parties)))
    sampler: Sampler = plan.sampler.build("rounds.samplers")
    return Coordinator(
        policy=policy,
        sampler=sampler,
        num_clients=federation.num_clients,
        rounds=plan.rounds,
        seed=plan.seed,
        sizes=federation.partition.sizes,
    )
