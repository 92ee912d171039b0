"""What every aggregator must satisfy. Shapes: C clients, D parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Update
from atoll.core.parts import Part, members

EVERY = members("aggregators")


def updates(seed: int, num: int, size: int = 7) -> Update:
    torch.manual_seed(seed)
    return Update(torch.randn(num, size), torch.randint(1, 20, (num,)).float(), {"extra": torch.randn(num, 3)})


def built(name: str) -> Aggregator:
    rule: Aggregator = Part(name).build("aggregators")
    return rule


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(4, 12), cut=st.integers(1, 3))
def test_folding_in_parts_equals_folding_at_once(name: str, seed: int, num: int, cut: int) -> None:
    rule, all_C = built(name), updates(seed, num)
    whole, _ = rule.finish(rule.add(rule.zero(), all_C), rule.init())
    first, second = all_C.rows(torch.arange(cut)), all_C.rows(torch.arange(cut, num))
    parts, _ = rule.finish(rule.merge(rule.add(rule.zero(), first), rule.add(rule.zero(), second)), rule.init())
    torch.testing.assert_close(whole.delta_D, parts.delta_D, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole.aux["extra"], parts.aux["extra"], atol=1e-5, rtol=1e-4)
    assert (whole.num_clients, whole.weight) == (num, pytest.approx(parts.weight))


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 12))
def test_a_permutation_changes_nothing(name: str, seed: int, num: int) -> None:
    rule, all_C = built(name), updates(seed, num)
    shuffled = all_C.rows(torch.randperm(num))
    before, _ = rule.finish(rule.add(rule.zero(), all_C), rule.init())
    after, _ = rule.finish(rule.add(rule.zero(), shuffled), rule.init())
    torch.testing.assert_close(before.delta_D, after.delta_D, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_equal_updates_aggregate_to_themselves(name: str) -> None:
    rule, one = built(name), updates(1, 1)
    same = one.rows(torch.zeros(5, dtype=torch.long))
    found, _ = rule.finish(rule.add(rule.zero(), same), rule.init())
    expected_D = one.delta_D[0].sign() if name == "majority" else one.delta_D[0]  # a vote has no magnitude
    torch.testing.assert_close(found.delta_D, expected_D)


def test_mean_and_median_are_what_they_say() -> None:
    all_C = updates(3, 6)
    weights = all_C.weight / all_C.weight.sum()
    mean, _ = built("mean").finish(built("mean").add({}, all_C), {})
    torch.testing.assert_close(mean.delta_D, (weights[:, None] * all_C.delta_D).sum(0))
    median, _ = built("median").finish(built("median").add({}, all_C), {})
    torch.testing.assert_close(median.delta_D, all_C.delta_D.quantile(0.5, dim=0))
    assert built("median").needs_individuals
    assert not built("mean").needs_individuals
