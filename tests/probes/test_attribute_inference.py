"""Attribute inference: a hidden column of records that are known but for it, against what clients hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.plan import Plan
from atoll.core.probe import Hidden, Samples, Work
from atoll.data.dataset import Dataset
from atoll.probes.attribute_inference import attribute_inference, imputed
from atoll.redteam.attribute_judge import attribute_figures, attributes_of
from atoll.redteam.run import red_team
from atoll.simulation.seat import Watched, watch

RIGHT, USUAL, REST = (
    "share of hidden values right",
    "share right by the usual value",
    "share right by all other columns",
)
ONE_STEP = {"steps": 1, "batch_size": "all", "lr": 0.1}


def table(num: int = 400, *, follows: bool = False) -> Dataset:
    """Four numbers and an attribute of three values, at random or told by the first number; the target is a sum."""
    rng = np.random.default_rng(3)
    numbers = rng.standard_normal((2 * num, 4))
    values = np.digitize(numbers[:, 0], [-0.5, 0.5]) if follows else rng.integers(0, 3, 2 * num)
    x = np.column_stack([numbers, np.eye(3)[values]]).astype(np.float32)
    y = (numbers.sum(1) + values + rng.standard_normal(2 * num) > 1).astype(np.int64)
    return Dataset(name="records", train_x=x[:num], train_y=y[:num], test_x=x[num:], test_y=y[num:], num_classes=2)


def watched_table(data: Dataset | str, num_clients: int = 20, **changes: Any) -> Watched:
    settings: dict[str, Any] = {
        "data": data,
        "model": {"name": "mlp_2nn", "hidden": 32},
        "partition": {"name": "iid", "num_clients": num_clients},
        "policy": {"size": 4},
        "local": ONE_STEP,
    }
    return watch(Plan(**{**settings, **changes}), 1)


def figures(watched: Watched) -> Mapping[str, float]:
    probe = attribute_inference()
    assert probe.why_not(watched.known, watched.sights) is None
    return attribute_figures(probe, watched, Work(np.random.default_rng(0), lambda: False))


def test_one_step_gives_away_what_no_other_column_says() -> None:
    found = figures(watched_table(table()))
    assert found[RIGHT] > 0.95 and found[USUAL] < 0.5 and found[REST] < 0.55


def test_what_other_columns_say_needs_no_update() -> None:
    found = figures(watched_table(table(follows=True)))
    assert found[REST] > 0.8 > found[USUAL] + 0.2 and found[RIGHT] >= found[REST]


def test_noise_takes_the_attack_back_to_its_floor() -> None:
    private = {"name": "local", "clip": 0.1, "sigma": 5.0, "delta": 1e-5, "test_noise": True}
    found = figures(watched_table(table(), privacy=private))
    assert found[RIGHT] == pytest.approx(found[REST], abs=0.05)


def test_shares_say_that_rows_are_explained() -> None:
    """One client, all of whose records are asked for: shares are 1 for the true values and 0 for others."""
    watched = watched_table(table(num=40), num_clients=8)
    own = watched.job.federation.client_samples(watched.truths[0][0].clients[0]).load()
    [attribute] = attributes_of(watched.known.elsewhere.x)
    true_C, x = attribute.of(own[0]), own[0].clone()
    x[:, attribute.columns_F] = 0
    hidden = Hidden(attribute.columns_F, attribute.values_VF, torch.zeros(len(x), dtype=torch.long))
    work = Work(np.random.default_rng(0), lambda: False, Samples(x, own[1]), hidden)
    [guess] = attribute_inference().run(watched.known, watched.sights, work)
    assert guess.score_CV is not None
    torch.testing.assert_close(guess.score_CV, torch.eye(3, dtype=torch.float64)[true_C], atol=0.05, rtol=0)
    assert imputed(watched.known, Samples(x, own[1]), hidden).sum(1).tolist() == pytest.approx([1.0] * len(x))


def test_the_command_judges_it_and_says_where_it_does_not_fit() -> None:
    plan = Plan(data=table(), model={"name": "mlp_2nn", "hidden": 16}, partition={"num_clients": 20}, local=ONE_STEP)
    [finding] = red_team(plan, probes=["attribute_inference"], rounds=1).findings
    assert finding.figures[RIGHT] > finding.figures[USUAL]
    [finding] = red_team(plan.replace({"data": "digits"}), probes=["attribute_inference"], rounds=1).findings
    assert "no rows of a table" in finding.why_not


def test_tables_without_such_a_column_are_not_judged() -> None:
    whole = table()
    numbers = Dataset(
        name="numbers",
        train_x=np.asarray(whole.train_x)[:, :4],
        train_y=whole.train_y,
        test_x=np.asarray(whole.test_x)[:, :4],
        test_y=whole.test_y,
        num_classes=2,
    )
    plan = Plan(data=numbers, model="logistic", partition={"num_clients": 20}, local=ONE_STEP)
    [finding] = red_team(plan, probes=["attribute_inference"], rounds=1).findings
    assert "2 to 16 values" in finding.why_not


@pytest.mark.slow
def test_purposes_of_real_loans_are_found() -> None:
    found = figures(watched_table("german_credit", num_clients=10))
    assert found[RIGHT] > 0.9 and found[REST] < 0.4
    epoch = figures(watched_table("german_credit", num_clients=10, local={"epochs": 1, "batch_size": 10, "lr": 0.05}))
    assert epoch[RIGHT] > 0.6
