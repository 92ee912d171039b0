"""Common parts of policies whose clients train while versions are committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from atoll.core.coordinator import CoordinatorState, Policy
from atoll.core.errors import PlanError

Staleness = Literal["constant", "hinge", "polynomial"]


def overlapping_policy(concurrency: int, size: int, staleness: Callable[[int], float], *, interpolates: bool) -> Policy:
    """Make a policy that keeps `concurrency` clients training and commits whenever `size` updates have arrived."""
    if not 1 <= size <= concurrency:
        raise PlanError(f"policy.size is {size} but policy.concurrency is {concurrency}: set 1 <= size <= concurrency")

    def num_wanted(state: CoordinatorState, num_clients: int) -> int:
        return concurrency - len(state.in_flight)

    def goal(num_clients: int) -> int:
        if concurrency > num_clients:
            raise PlanError(
                f"policy.concurrency is {concurrency} but the federation has {num_clients} clients: lower it, "
                "or make more clients with partition.num_clients"
            )
        return size

    return Policy(
        num_wanted=num_wanted,
        goal=goal,
        overlaps_rounds=True,
        staleness=staleness,
        interpolates=interpolates,
        min_clients=concurrency,
    )


def staleness_factor(name: Staleness, a: float, b: float) -> Callable[[int], float]:
    """Return a function: versions late s -> factor on the weight (Xie et al. 2019, arXiv:1903.03934, section 5.2).

    constant: 1; hinge: 1 up to b, then 1 / (a (s - b) + 1); polynomial: (s + 1)^-a.

    >>> [round(staleness_factor("polynomial", 0.5, 4)(s), 2) for s in (0, 3, 8)]
    [1.0, 0.5, 0.33]
    """
    if name == "constant":
        return lambda late: 1.0
    if name == "hinge":
        return lambda late: 1.0 if late <= b else 1 / (a * (late - b) + 1)
    return lambda late: float((late + 1) ** -a)
