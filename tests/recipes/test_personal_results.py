"""What the recipes of personal methods must show. Slow: minutes of training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll import Plan, compare_personal, run
from atoll.report.personal import PersonalTable, mean_of

RECIPES = Path(__file__).parents[2] / "recipes" / "personal"
sys.path.insert(0, str(RECIPES))

from known_groups import known  # noqa: E402


def recipe(name: str) -> Plan:
    return Plan.from_toml((RECIPES / f"{name}.toml").read_text())


def means(table: PersonalTable, method: str) -> list[float]:
    """Return the mean accuracy over clients of each seed, in percent."""
    return [100 * mean_of(run.own) for run in table.done(method)]


def lead(table: PersonalTable, method: str, other: str) -> float:
    """Return the least lead of a method over another with the same seed, in points."""
    return min(mine - theirs for mine, theirs in zip(means(table, method), means(table, other), strict=True))


@pytest.mark.slow
def test_a_shared_body_helps_clients_that_train_in_turn(tmp_path: Path) -> None:
    table = compare_personal(recipe("fashion_in_turn"), out=tmp_path, methods=["fedper"], seeds=3)
    print({method: means(table, method) for method in table.ranked()})
    assert lead(table, "fedper", "local") >= 1.5
    assert lead(table, "fedper", "fedavg") >= 10


@pytest.mark.slow
def test_everybody_at_once_helps_less_than_in_turn(tmp_path: Path) -> None:
    """FedAvg gets better where all take part in each round, so that personal models have less to add."""
    table = compare_personal(recipe("fashion_5_classes"), out=tmp_path, methods=["interpolation"], seeds=3)
    print({method: means(table, method) for method in table.ranked()})
    assert lead(table, "interpolation", "local") >= 1.0
    assert lead(table, "interpolation", "fedavg") >= 5


@pytest.mark.slow
def test_few_images_of_few_classes_are_not_enough_alone(tmp_path: Path) -> None:
    table = compare_personal(recipe("cifar_classes"), out=tmp_path, methods=["fine_tuning:steps=100"], seeds=1)
    print({method: means(table, method) for method in table.ranked()})
    assert lead(table, "fine_tuning:steps=100", "local") >= 3


@pytest.mark.slow
def test_own_norms_help_where_features_differ(tmp_path: Path) -> None:
    """Li et al. 2021 (arXiv:2102.07623)."""
    table = compare_personal(recipe("feature_skew"), out=tmp_path, methods=["fedbn"], seeds=3)
    print({method: means(table, method) for method in table.ranked()})
    assert lead(table, "fedbn", "fedavg") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_are_found_and_worth_as_much_as_known_ones(seed: int, tmp_path: Path) -> None:
    now = known(recipe("swapped_labels"), seed, tmp_path)
    print(now)
    assert now.found
    assert now.finding >= now.knowing - 0.01


@pytest.mark.slow
def test_two_neighbouring_classes_are_easy_for_own_models(tmp_path: Path) -> None:
    """PFLlib's table (arXiv:2312.04992): personal methods above 99 %, one model for all at 80 %."""
    table = compare_personal(recipe("pfllib_fashion"), out=tmp_path, methods=["fedper"], seeds=1)
    print({method: means(table, method) for method in table.ranked()})
    assert means(table, "fedper")[0] >= 99
    assert means(table, "local")[0] >= 99
    assert means(table, "fedavg")[0] <= 82


@pytest.mark.slow
def test_new_clients_get_more_with_every_step() -> None:
    """After 5 steps FedAvg's model is ahead of per_fedavg's: the guide says so."""
    plan = recipe("new_clients")
    after = {name: run(plan.replace({"algorithm": name})).new_clients for name in ("fedavg", "per_fedavg")}
    print({name: {k: round(100 * each["mean"], 2) for k, each in found.items()} for name, found in after.items()})
    for found in after.values():
        assert found[100]["mean"] > found[0]["mean"] + 0.02
