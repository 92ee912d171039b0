"""Synchronous rounds: a cohort trains, and its updates make the next version."""

from __future__ import annotations

import math
from typing import Annotated

from atoll.core.coordinator import CoordinatorState, Policy
from atoll.core.errors import PlanError
from atoll.core.options import Count, Positive, Range


def cohort(
    size: Count | None = None,
    fraction: Annotated[float, Range(0, 1, hint="0 means one client, 1 all of them")] | None = None,
    over_selection: Annotated[float, Range(1, 10**6)] = 1.0,
    min_reports: Count = 1,
    deadline: Positive | None = None,
) -> Policy:
    """Select max(1, C*K) clients, or `size`, and commit when that many reported (McMahan et al. 2017, algorithm 1).

    `over_selection` selects more than are needed (Bonawitz et al. 2019, arXiv:1902.01046, section 4.2): the first to
    arrive count. After `deadline` seconds (simulated ones, if the plan has devices) the updates that have arrived are
    committed if they are at least `min_reports`; otherwise the attempt is abandoned. With neither size nor fraction all
    clients are selected.
    """
    if size is not None and fraction is not None:
        raise PlanError(
            f"policy: size = {size} and fraction = {fraction} both set the size of the cohort: leave one out"
        )

    def goal(num_clients: int) -> int:
        if size is not None and size > num_clients:
            raise PlanError(
                f"policy.size is {size} but the federation has {num_clients} clients: "
                f"set policy.size to at most {num_clients}, or make more clients with partition.num_clients"
            )
        cohort_size = size or max(1, round((1.0 if fraction is None else fraction) * num_clients))
        if min_reports > cohort_size:
            raise PlanError(
                f"policy.min_reports is {min_reports} but a cohort has {cohort_size} clients: no round could be "
                f"committed; set policy.min_reports to at most {cohort_size}"
            )
        return cohort_size

    def num_wanted(state: CoordinatorState, num_clients: int) -> int:
        return min(num_clients, math.ceil(goal(num_clients) * over_selection))

    least = max(size or 1, min_reports)
    return Policy(num_wanted=num_wanted, goal=goal, min_reports=min_reports, deadline=deadline, min_clients=least)
