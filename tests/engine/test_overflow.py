"""Updates that are too long, and versions that overflow. Shapes: D parameters, C clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll import Plan, run
from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.core.plan import MAX_NORM

BAD = 2
BASE = Plan(
    rounds=2,
    partition={"name": "iid", "num_clients": 5},
    engine="inline",
    attackers={"clients": [BAD]},
    evaluation={"every": 2},
)
NO_BOUND = {"server.max_norm": 1e300}


def filled(value: float) -> Callable[[], Attack]:
    """Sends a vector of one number."""

    def attack() -> Attack:
        def update(honest: Update, known: Knowledge) -> Update:
            return honest._replace(delta_D=torch.full_like(honest.delta_D, value))

        return Attack(update=update, knows="its own update")

    return attack


def scaled_extras(factor: float) -> Callable[[], Attack]:
    """Sends an honest update with other extra vectors."""

    def attack() -> Attack:
        def update(honest: Update, known: Knowledge) -> Update:
            return honest._replace(aux={name: factor * value for name, value in honest.aux.items()})

        return Attack(update=update, knows="its own update")

    return attack


def rows(settings: dict[str, Any], attack: Callable[[], Attack]) -> list[dict[str, Any]]:
    return run(BASE.replace({**settings, "attack": attack})).history


@pytest.mark.parametrize("value", [3.4e38, 1e30, 1e19, MAX_NORM])
def test_updates_beyond_the_default_bound_are_rejected(value: float) -> None:
    history = rows({}, filled(value))
    assert [row["rejected"] for row in history] == [1, 2]
    assert history[-1]["test"]["accuracy"] > 0.8


def test_the_bound_is_the_plans() -> None:
    long = {"attack": {"name": "large_norm", "norm": 100.0}}
    free, bound = (run(BASE.replace({**long, **more})).history for more in ({}, {"server.max_norm": 99.0}))
    assert [row["rejected"] for row in free] == [0, 0]
    assert [row["rejected"] for row in bound] == [1, 2]
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"server\.max_norm must be .*above 0"):
            BASE.replace({"server.max_norm": wrong})
    assert "max_norm" not in BASE.to_toml()  # plans of before have the same identity


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "fedadam"},
        {"algorithm": "scaffold"},
        {"algorithm": "afl"},
        {"detection": "distance"},
        {"policy": {"name": "buffered", "size": 3, "concurrency": 5}},
        {"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-4, "test_noise": True}},
    ],
    ids=str,
)
def test_a_version_that_overflows_is_made_again_without_whom_made_it_so(settings: dict[str, Any]) -> None:
    done = run(BASE.replace({**NO_BOUND, **settings, "attack": filled(3.4e38)}))
    state = done.history
    assert [row["round"] for row in state] == [1, 2]
    assert bool(torch.cat([value.flatten() for value in done.model.state_dict().values()]).isfinite().all())
    if "privacy" not in settings:  # what is told of a private round names nobody
        assert [row.get("overflowed") for row in state].count([BAD]) == 1
        assert state[-1]["rejected"] == 1  # and it is not asked again


def test_the_rest_of_a_version_that_overflowed_is_what_it_would_have_been() -> None:
    long, nan = (
        run(BASE.replace({**more, "rounds": 1}))
        for more in ({**NO_BOUND, "attack": filled(3.4e38)}, {"attack": "not_finite"})
    )
    for ours, theirs in zip(long.model.state_dict().values(), nan.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [("fednova", -1e12), ("fednova", 1e6), ("qffl", 0.0), ("qffl", -100.0), ("fedexp", 1e9), ("fedexp", -1e9)],
)
def test_extras_that_no_client_could_have_made_are_rejected(algorithm: str, factor: float) -> None:
    history = rows({"algorithm": algorithm}, scaled_extras(factor))
    assert [row["rejected"] for row in history] == [1, 2]


@pytest.mark.parametrize(
    "algorithm", ["fednova", "qffl", "fedexp", {"name": "qffl", "q": 5.0}, {"name": "qffl", "q": 0.0}]
)
@pytest.mark.parametrize("lr", [0.01, 1.0])
def test_honest_extras_are_plausible(algorithm: Any, lr: float) -> None:
    history = run(BASE.replace({"algorithm": algorithm, "local.lr": lr, "rounds": 4})).history
    assert history[-1]["rejected"] == 0
