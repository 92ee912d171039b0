"""From a plan to the things that run it."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.coordinator import Coordinator, CoordinatorState
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.engine.base import Engine, unheard
from atoll.train.job import Job


def build_engine(
    part: Part,
    job: Job,
    coordinator: Coordinator,
    done: int = 0,
    tell: Callable[[str], None] = unheard,
    plan: Plan | None = None,
) -> Engine:
    """The engine of a plan, told how many clients can be trained together and how many rounds are left.

    `tell` is called with what takes long. `plan` is what the job was built from, for engines that build it anew in
    other processes.
    """
    asked = coordinator.policy.num_wanted(CoordinatorState(), coordinator.num_clients)
    goal = coordinator.policy.goal(coordinator.num_clients)
    cohort = (
        max(goal, asked // 4) if coordinator.policy.overlaps_rounds else min(asked, goal)
    )  # many are trained before
    engine: Engine = part.build("engine", job, cohort=cohort, rounds=coordinator.rounds - done, tell=tell, plan=plan)
    return engine
