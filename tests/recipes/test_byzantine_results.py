"""The recipes on bad clients show what they say. Slow: minutes to an hour of training."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from atoll.core.plan import Plan
from atoll.matrix import run_matrix
from atoll.report.matrix import NO_ATTACK

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("byzantine_mnist", RECIPES / "byzantine_mnist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_shows_what_is_known_beside_what_was_published(tmp_path: Path) -> None:
    module = recipe()
    module.write({(0.0, 4): (0.954, "alie")}, Namespace(out=tmp_path, seeds=[0, 1]))
    lines = (tmp_path / "byzantine-mnist.md").read_text().splitlines()
    assert "seeds 0, 1" in lines[0]
    assert lines[-1] == "| 0 | - (0.87) | - (0.61) | - (0.26) | 0.954 alie (0.27) |"
    assert (tmp_path / "byzantine-mnist.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_single_shot_backdoor_fools_the_mean_and_not_the_defence(tmp_path: Path) -> None:
    plan = Plan.from_toml((RECIPES / "single_shot_backdoor.toml").read_text())
    attack, defence = "backdoor:target=3:boost=20", "sybils+norm_clipping"
    matrix = run_matrix(plan, attacks=[attack], defences=["mean", defence], f=[1], out=tmp_path)
    hits = {rule: matrix.mean("attack_success", attack, rule, 1) or 0.0 for rule in matrix.defences}
    assert hits["mean"] >= 0.95 and hits[defence] <= 0.10
    plain, kept = (matrix.mean("accuracy", *cell, 1) or 0.0 for cell in ((NO_ATTACK, "mean"), (attack, defence)))
    assert plain - kept < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["sign_flip", "label_flip", "mimic", "ipm:factor=0.1", "alie"])
def test_centered_clipping_behind_buckets_keeps_97_5_percent(attack: str, tmp_path: Path) -> None:
    plan = Plan.from_toml((RECIPES / "byzantine_bucketing.toml").read_text())
    defence = "bucketing:size=2+centered_clipping:tau=0.3:iterations=3"
    matrix = run_matrix(plan, attacks=[attack], defences=[defence], f=[5], out=tmp_path)
    assert (matrix.worst(defence, 5).accuracy or 0.0) >= 0.975


@pytest.mark.slow
@pytest.mark.parametrize("f", [1, 4])
def test_sorted_labels_are_learnt_in_spite_of_colluders(f: int, tmp_path: Path) -> None:
    module = recipe()
    found = module.worst(0.0, Namespace(runs=tmp_path, seeds=[0], f=[f], workers=None))
    assert found[0.0, f][0] > module.PUBLISHED[0.0][f - 1]
