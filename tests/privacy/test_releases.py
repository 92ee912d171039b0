"""The noise of what a run releases, read off the released values themselves. Shapes: T rounds, V entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from privacy.watching import watching
from scipy import stats

from atoll import Plan, run
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.devices import INSTANT, Devices, Load, Trip
from atoll.core.messages import Aggregate
from atoll.privacy.grid import LEVELS
from atoll.privacy.mechanisms.ftrl import node_changes

SIZE = 3000
SETTINGS: dict[str, Any] = {"clip": 2.0, "sigma": 1.5, "delta": 1e-5, "test_noise": True}
"""Noise that repeats, so that a test of chance gives one answer; it is drawn by the same functions."""
NUM_CLIENTS, COHORT = 40, 10


def plan_of(algorithm: Any, privacy: dict[str, Any], sampler: str = "poisson", **more: Any) -> Plan:
    return Plan(
        partition={"name": "iid", "num_clients": NUM_CLIENTS},
        model={"name": "privacy.watching:wide", "size": SIZE},
        algorithm=algorithm,
        policy={"size": COHORT},
        local={"steps": 1},
        sampler=sampler,
        privacy={**SETTINGS, **privacy},
        evaluation={"every": 0},
        engine="inline",
        **{"rounds": 12, **more},
    )


def released(privacy: dict[str, Any], sampler: str = "poisson", **more: Any) -> np.ndarray:
    """Return what rounds release if no client changes the model, (T, V)."""
    seen: list[Aggregate] = []
    run(plan_of(watching(seen), privacy, sampler, **more))
    return torch.stack([aggregate.delta_D for aggregate in seen[1:]]).numpy()  # the first is a rehearsal


def steps_of(values_TV: np.ndarray, levels: int) -> np.ndarray:
    """Return released values in whole steps of the grid."""
    exact_TV = values_TV * (COHORT * levels / SETTINGS["clip"])
    steps_TV = np.rint(exact_TV)
    assert np.abs(exact_TV - steps_TV).max() < 1e-3  # they lie on the grid: nothing was added after the noise
    return steps_TV


def fits_gaussian(steps: np.ndarray, sigma: float) -> float:
    """The p-value of a chi-square test in 60 cells of equal chance against the discrete Gaussian."""
    edges = stats.norm.ppf(np.linspace(0, 1, 61)[1:-1]) * sigma
    counts = np.bincount(np.searchsorted(edges, steps.ravel()), minlength=60)
    return float(stats.chisquare(counts).pvalue)


def independent(values_TV: np.ndarray) -> bool:
    """Whether no two rows are correlated, nor each row's neighbours."""
    corr = np.corrcoef(values_TV)
    pairs = corr[np.triu_indices(len(corr), 1)]
    shifted = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in values_TV]
    return max(np.abs(pairs).max(), np.abs(shifted).max()) < 5 / math.sqrt(values_TV.shape[1])


def test_central_noise_is_the_discrete_gaussian_of_its_sigma() -> None:
    steps_TV = steps_of(released({"name": "central"}), LEVELS)
    sigma = SETTINGS["sigma"] * LEVELS
    num = steps_TV.size
    assert steps_TV.std() / sigma == pytest.approx(1, abs=4 / math.sqrt(2 * num))
    assert abs(steps_TV.mean()) < 4 * sigma / math.sqrt(num)
    assert fits_gaussian(steps_TV, sigma) > 1e-4
    last_digits = np.bincount((steps_TV.astype(np.int64) % 64).ravel(), minlength=64)
    assert stats.chisquare(last_digits).pvalue > 1e-4  # no gaps of floats: every step is there
    assert independent(steps_TV)


def test_noise_differs_between_runs_and_test_noise_repeats() -> None:
    first, second = (released({"name": "central", "test_noise": False}, rounds=2) for _ in range(2))
    assert not np.isclose(first, second, rtol=1e-9, atol=0).any()
    marked = [released({"name": "central"}, rounds=2) for _ in range(2)]
    assert np.array_equal(*marked)


def test_an_adaptive_clip_pays_for_its_count() -> None:
    values_TV = released({"name": "central", "quantile": 0.5, "bit_sigma": 1.0}, rounds=1)
    wanted = (1.5**-2 - 2.0**-2) ** -0.5
    assert values_TV.std() / (SETTINGS["clip"] / COHORT) == pytest.approx(wanted, rel=0.05)


def test_local_noise_is_in_every_update() -> None:
    """What clients send is on its way to the rule: a median can only tell its noise if each has its own."""
    seen: list[Aggregate] = []
    run(plan_of(watching(seen), {"name": "local"}, "uniform", rounds=3))
    values_TV = torch.stack([aggregate.delta_D for aggregate in seen[1:]]).numpy()
    sigma = SETTINGS["sigma"] * SETTINGS["clip"] / math.sqrt(COHORT)
    assert values_TV.std() / sigma == pytest.approx(1, abs=4 / math.sqrt(2 * values_TV.size))
    assert fits_gaussian(values_TV, sigma) > 1e-4
    assert independent(values_TV)


def test_local_noise_differs_between_clients() -> None:
    rows: list[torch.Tensor] = []

    def spread(updates_CD: torch.Tensor, weight_C: torch.Tensor) -> torch.Tensor:
        rows.append(updates_CD)
        assert bool((weight_C == 1).all())  # a weight would tell how many samples there are
        return updates_CD.mean(0)

    def looking() -> Aggregator:
        return stacked(spread)

    run(plan_of(watching([]), {"name": "local"}, "uniform", rounds=2, aggregator=looking))
    del rows[0]  # the rehearsal
    sigma = SETTINGS["sigma"] * SETTINGS["clip"]
    for updates_CD in rows:
        values_CV = updates_CD.numpy()
        assert values_CV.shape[0] == COHORT
        assert independent(values_CV)
        assert fits_gaussian(values_CV, sigma) > 1e-4
    assert independent(torch.cat(rows).numpy())


@pytest.mark.parametrize("lost", [0, 3])
def test_distributed_shares_add_up_to_the_noise_if_some_drop_out(lost: int) -> None:
    """Every integer has its share: the grid is coarse enough to compare with the probabilities one by one."""
    bits, dropouts = 5, 3
    devices = {"devices": "privacy.test_releases:losing"} if lost else {}
    privacy = {"name": "distributed", "dropouts": dropouts, "bits": bits}
    steps_TV = steps_of(released(privacy, "uniform", rounds=8, **devices), 1 << bits)
    least = SETTINGS["sigma"] * (1 << bits)
    sigma = least * math.sqrt((COHORT - lost) / (COHORT - dropouts))
    assert steps_TV.std() / sigma == pytest.approx(1, abs=4 / math.sqrt(2 * steps_TV.size))
    assert steps_TV.std() >= least * 0.99
    support = np.arange(-4 * int(sigma), 4 * int(sigma) + 1)
    mass = np.exp(-(support**2) / (2 * sigma**2))
    counts = np.array([(steps_TV == value).sum() for value in support])
    inside = counts.sum()
    assert inside > 0.999 * steps_TV.size
    expected = mass / mass.sum() * inside
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert independent(steps_TV)


def losing() -> Devices:
    """Return devices that lose the first three clients of every cohort."""

    def trips(loads: Sequence[Load], rng: np.random.Generator) -> list[Trip]:
        return [Trip(0.0, fails=number < 3) for number in range(len(loads))]

    return INSTANT._replace(trips=trips)


def test_tree_noise_does_not_grow_with_the_rounds() -> None:
    """The noise of the running sum after t rounds of a pass is made of as many nodes as t has ones in binary."""
    steps_TV = steps_of(released({"name": "ftrl"}, "round_robin", rounds=11), LEVELS)
    sigma, length = SETTINGS["sigma"] * LEVELS, NUM_CLIENTS // COHORT
    assert length == 4
    for tree in (steps_TV[:4], steps_TV[4:8], steps_TV[8:]):
        for number, sums_V in enumerate(np.cumsum(tree, axis=0), start=1):
            wanted = sigma * math.sqrt(number.bit_count())
            assert sums_V.std() / wanted == pytest.approx(1, abs=4 / math.sqrt(2 * SIZE))
            assert fits_gaussian(sums_V, wanted) > 1e-4
    nodes_TV = np.stack([np.cumsum(steps_TV[i : i + 4], axis=0)[3] for i in (0, 4)])
    assert independent(nodes_TV)


def test_the_nodes_of_a_tree_are_those_of_the_binary_digits() -> None:
    held: set[int] = set()
    for step in range(1, 70):
        for node, sign in node_changes(step):
            held.symmetric_difference_update({node})
            assert (node in held) == (sign > 0)
        digits = [1 << k for k in range(7) if step >> k & 1]
        ends = {sum(digits[i:]) for i in range(len(digits))}
        assert held == ends
