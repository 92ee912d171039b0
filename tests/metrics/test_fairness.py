"""Fairness by groups against its definitions, computed apart, and an example worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import PlanError
from atoll.core.metric import add_up
from atoll.core.problem import Scored
from atoll.metrics.fairness_figures import MAX_CLASSES, Fairness, fairness, fairness_sums, jain, worst


def drawn(form: str, seed: int, num_samples: int = 200) -> tuple[Scored, Any]:
    rng = np.random.default_rng(seed)
    columns = {"classes": (4,), "labels": (3,)}.get(form, ())
    scores = rng.standard_normal((num_samples, *columns))
    noisy = scores + rng.standard_normal(scores.shape)
    targets = noisy.argmax(1) if form == "classes" else (noisy > 0).astype(np.float32)
    weight = rng.choice([0.0, 0.5, 1.0, 2.0], num_samples)
    return Scored(*(torch.from_numpy(each) for each in (scores, targets, weight))), rng.integers(0, 3, num_samples)


def by_definition(scored: Scored, group_N: Any, num_groups: int) -> dict[str, Any]:
    """Compute shares of every group and every class or label sample by sample."""
    scores, targets, weight = (each.numpy() for each in scored)
    if scores.ndim == 2 and targets.ndim == 1:
        guess, truth = (np.eye(scores.shape[1])[each] for each in (scores.argmax(1), targets))
    else:
        guess, truth = ((each > 0).reshape(len(each), -1).astype(float) for each in (scores, targets))
    accuracy, selected, odds = [], [], []
    for group in range(num_groups):
        mine = (group_N == group) & (weight > 0)
        g, t, w = guess[mine], truth[mine], weight[mine]
        accuracy.append(np.average((g == t).all(1), weights=w))
        selected.append(np.average(g, axis=0, weights=w))
        rates = []
        for k in range(g.shape[1]):
            for value in (1, 0):
                of = t[:, k] == value
                rates.append(np.average(g[of, k], weights=w[of]) if of.any() else np.nan)
        odds.append(rates)
    return {
        "accuracy": accuracy,
        "parity": float(np.ptp(selected, axis=0).max()),
        "odds": float(np.nanmax(np.nanmax(odds, 0) - np.nanmin(odds, 0))),
    }


def sums_of(scored: Scored, group_N: Any, num_groups: int, slices: int = 1) -> dict[str, torch.Tensor]:
    pieces = zip(*(each.tensor_split(slices) for each in (*scored, torch.from_numpy(group_N))), strict=True)
    parts = [fairness_sums(Scored(*piece[:3]), piece[3], num_groups) for piece in pieces]
    total = parts[0]
    for part in parts[1:]:
        total = add_up(total, part)
    return total


@pytest.mark.parametrize("form", ["classes", "binary", "labels"])
@pytest.mark.parametrize("slices", [1, 6])
def test_figures_are_those_of_the_definitions(form: str, slices: int) -> None:
    for seed in range(3):
        scored, group_N = drawn(form, seed)
        found = fairness(sums_of(scored, group_N, 3, slices), ["a", "b", "c"])
        expected = by_definition(scored, group_N, 3)
        assert list(found.accuracy.values()) == pytest.approx(expected["accuracy"], abs=1e-12)
        assert found.demographic_parity_difference == pytest.approx(expected["parity"], abs=1e-12)
        assert found.equalised_odds_difference == pytest.approx(expected["odds"], abs=1e-12)
        assert found.worst_accuracy == pytest.approx(min(expected["accuracy"]))
        assert found.worst_group == "abc"[int(np.argmin(expected["accuracy"]))]
        accuracy = np.array(expected["accuracy"])
        assert found.jain == pytest.approx(accuracy.sum() ** 2 / (3 * (accuracy**2).sum()))


def test_an_example_by_hand() -> None:
    """Ten answers of two groups."""
    truth = [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    guess = [0, 1, 0, 1, 1, 0, 1, 0, 0, 0]
    group = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1]  # a: samples 0, 3, 5, 6, 8; b: the others
    scored = Scored(torch.tensor(guess) * 2.0 - 1, torch.tensor(truth), torch.ones(10))
    found = fairness(fairness_sums(scored, torch.tensor(group), 2), ["a", "b"])
    # a: truth 0 1 0 1 1, guess 0 1 0 1 0: 4 of 5 right, 2 of 5 chosen, 2 of 3 ones found, 0 of 2 zeros mistaken.
    # b: truth 1 1 0 1 0, guess 1 0 1 0 0: 2 of 5 right, 2 of 5 chosen, 1 of 3 ones found, 1 of 2 zeros mistaken.
    assert found == Fairness(
        accuracy={"a": 0.8, "b": 0.4},
        worst_group="b",
        worst_accuracy=0.4,
        demographic_parity_difference=0.0,
        equalised_odds_difference=0.5,
        jain=pytest.approx(1.2**2 / (2 * (0.64 + 0.16))),
    )
    assert found.figures["accuracy_b"] == 0.4 and found.figures["equalised_odds_difference"] == 0.5
    assert all(isinstance(value, float) for value in found.figures.values())


def test_a_published_example() -> None:
    """The user guide of Fairlearn, "Common fairness metrics": differences of 0.25 and 1.0.

    True positive rates are 0.5, 0.6 and 0.4 there, false ones 1, 0 and 2/3, and 0.75, 0.5 and 0.5 are selected.
    """
    truth = [int(each) for each in "011110101000111111"]
    guess = [int(each) for each in "001011100111100110"]
    group = ["abc".index(each) for each in "bbabbcccaacabccbcc"]
    scored = Scored(torch.tensor(guess) * 2.0 - 1, torch.tensor(truth), torch.ones(18))
    sums = fairness_sums(scored, torch.tensor(group), 3)
    assert (sums["hits"] / sums["true"]).flatten().tolist() == pytest.approx([0.5, 0.6, 0.4])
    found = fairness(sums, "abc")
    assert found.demographic_parity_difference == 0.25 and found.equalised_odds_difference == 1.0


def test_two_classes_as_two_logits_or_as_one_give_the_same() -> None:
    scored, group_N = drawn("binary", 7)
    both = torch.stack([torch.zeros_like(scored.scores), scored.scores], 1)
    one = fairness(sums_of(scored, group_N, 3), "abc").figures
    assert fairness(sums_of(Scored(both, scored.targets.long(), scored.weight_N), group_N, 3), "abc").figures == (
        pytest.approx(one)
    )


def test_groups_without_samples_are_not_compared() -> None:
    scored, group_N = drawn("binary", 1)
    found = fairness(sums_of(scored, group_N, 5), "abcde")
    assert math.isnan(found.accuracy["e"]) and found.worst_group in "abc"
    known = fairness(sums_of(scored, group_N, 3), "abc")
    assert found.figures | known.figures == pytest.approx(found.figures, nan_ok=True)
    alone = fairness(sums_of(scored, 0 * group_N, 2), "ab")
    assert math.isnan(alone.demographic_parity_difference) and alone.jain == 1.0
    nobody = fairness(sums_of(scored._replace(weight_N=0 * scored.weight_N), group_N, 3), "abc")
    assert nobody.worst_group == "" and math.isnan(nobody.worst_accuracy) and math.isnan(nobody.jain)


def test_sums_are_bounded_for_many_classes() -> None:
    scores = torch.eye(MAX_CLASSES + 1)
    scored = Scored(scores, torch.arange(MAX_CLASSES + 1), torch.ones(MAX_CLASSES + 1))
    sums = fairness_sums(scored, torch.arange(MAX_CLASSES + 1) % 2, 2)
    assert {name: tuple(value.shape) for name, value in sums.items()} == {"count": (2,), "right": (2,)}
    found = fairness(sums, ["even", "odd"])
    assert found.accuracy == {"even": 1.0, "odd": 1.0} and math.isnan(found.equalised_odds_difference)


def test_jain_and_the_worst_site() -> None:
    assert jain([0.5, 0.5, math.nan]) == 1.0 and jain([0.0, 0.0]) == 1.0 and math.isnan(jain([]))
    assert jain([3.0, 1.0]) == pytest.approx(16 / 20)
    assert worst({"a": 2.0, "b": 3.0}, larger_is_better=False) == ("b", 3.0)
    assert worst({"a": math.nan})[0] == ""


def test_wrong_groups_are_refused() -> None:
    scored, group_N = drawn("binary", 0)
    with pytest.raises(PlanError, match=r"each of 200 samples needs a group in 0..1: .* with group 2; number"):
        fairness_sums(scored, torch.from_numpy(group_N), 2)
    with pytest.raises(PlanError, match=r"got groups of shape \(3,\); number the groups"):
        fairness_sums(scored, torch.zeros(3), 2)
    with pytest.raises(PlanError, match=r"fairness by groups takes .* choose one of concordance"):
        fairness_sums(Scored(torch.zeros(3), torch.zeros(3, 2), torch.ones(3)), torch.zeros(3), 2)
