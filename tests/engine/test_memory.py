"""Memory does not grow with the cohort, and hardly with the federation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from engine.run_farm import Farm


class Cost(NamedTuple):
    """Megabytes at the worst moment, of the run and of its largest worker, and seconds to the first round."""

    own: int
    worker: int
    seconds: float


def cost(farm: Farm, **plan: Any) -> Cost:
    farm.start(plan, None)
    said = farm.until("ended")
    assert said[-1] == "ended 0"
    own, worker = (int(line.split()[1]) for line in said if line.startswith("peak"))
    return Cost(own, worker, float(next(line for line in said if line.startswith("round 1 ")).split()[2]))


@pytest.mark.parametrize("name", ["vectorised", "processes", pytest.param("inline", marks=pytest.mark.slow)])
def test_a_large_cohort_needs_no_more_memory_than_a_small_one(farm: Farm, name: str) -> None:
    """The updates of 1,000 clients would fill 220 MB if they were kept."""
    plan: dict[str, Any] = {
        "partition": {"num_clients": 1000},
        "model": {"name": "mlp_2nn"},
        "local": {"steps": 1, "batch_size": 2},
        "rounds": 1,
        "engine": {"name": name} if name == "inline" else {"name": name, "stack": 5},
    }
    small, large = (cost(farm, policy={"size": size}, **plan) for size in (10, 1000))
    assert large.own < 1.1 * small.own
    assert large.worker <= 1.1 * small.worker
    assert (small.worker > 0) == (name == "processes")


@pytest.mark.slow
def test_rules_that_see_every_update_keep_them(farm: Farm) -> None:
    """The measure above is a good one: the median needs all updates at once, and it shows."""
    plan: dict[str, Any] = {
        "partition": {"num_clients": 300},
        "model": {"name": "mlp_2nn"},
        "local": {"steps": 1, "batch_size": 2},
        "aggregator": {"name": "median"},
        "rounds": 1,
        "engine": {"name": "vectorised", "stack": 5},
    }
    small, large = (cost(farm, policy={"size": size}, **plan) for size in (10, 300))
    assert large.own - small.own > 60


@pytest.mark.parametrize("engine", ["vectorised", "processes", "auto"])
def test_a_million_clients_start_at_once(farm: Farm, engine: str) -> None:
    plan: dict[str, Any] = {"policy": {"size": 100}, "rounds": 1, "engine": {"name": engine}}
    thousand, million = (
        cost(farm, partition={"num_clients": num, "samples_per_client": 20}, **plan) for num in (1000, 1_000_000)
    )
    assert million.seconds < 5
    assert million.own - thousand.own < 200
    assert million.worker - thousand.worker < 200
