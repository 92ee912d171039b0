"""What single rules promise beyond the laws of their family. Shapes: C clients, D parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from members import every_example

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Update
from atoll.core.parts import Part

F = 2
LEAST = {
    "bulyan": 4 * F + 3,
    "caf": 2 * F + 1,
    "krum": 2 * F + 3,
    "median_of_means": 2 * F + 1,
    "minimum_diameter": 2 * F + 1,
    "multi_krum": 2 * F + 3,
    "trimmed_mean": 2 * F + 1,
}
"""The fewest updates for F bad clients, as papers say."""
WITHIN_RANGE = [
    Part("median"),
    Part("trimmed_mean", f=F),
    Part("bulyan", f=F),
    Part("nnm", f=F, rule={"name": "trimmed_mean", "f": F}),
    Part("krum", f=F),
]
"""Rules that promise every coordinate within the range of the honest ones, whatever F bad clients send."""


def built(part: Part) -> Aggregator:
    rule: Aggregator = part.build("aggregators", seed=3)
    return rule


def updates(seed: int, num: int, size: int = 7) -> Update:
    made = torch.Generator().manual_seed(seed)
    return Update(torch.randn(num, size, generator=made), torch.randint(1, 20, (num,), generator=made).float(), {})


def aggregated(part: Part, cohort: Update) -> torch.Tensor:
    rule = built(part)
    acc = rule.add(rule.zero(), cohort)
    own = Update(torch.linspace(-1, 2, cohort.delta_D.shape[1]), torch.tensor(1.0), {})
    return rule.finish(acc if rule.add_server_update is None else rule.add_server_update(acc, own), rule.init())[
        0
    ].delta_D


@pytest.mark.parametrize("name", LEAST)
def test_as_many_updates_are_needed_as_papers_say(name: str) -> None:
    assert built(Part(name, f=F)).min_updates == LEAST[name]


@pytest.mark.parametrize("part", WITHIN_RANGE, ids=repr)
@settings(max_examples=40, deadline=None)
@example(seed=325494, num=11, size=1.0)  # a bad value beyond the range is nearer to the median than honest ones
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16), size=st.sampled_from([0.1, 1.0, 3.0, 100.0, 1e20, 3e38]))
def test_coordinates_stay_within_the_range_of_the_honest(part: Part, seed: int, num: int, size: float) -> None:
    all_C = updates(seed, num)
    honest_CD = all_C.delta_D[F:].clone()
    all_C.delta_D[:F] = (size * all_C.delta_D[:F] / all_C.delta_D[:F].abs().max()).clamp(-3.4e38, 3.4e38)
    if part.name == "krum" and size <= 3:
        return  # krum may take a bad update that lies among the honest: it promises one that is near them
    found_D = aggregated(part, all_C)
    slack_D = torch.full_like(found_D, 1e-4)
    if part.name == "bulyan" and size <= 3:
        slack_D += honest_CD.amax(0) - honest_CD.amin(0)  # bad values that are as near to the median may count
    assert bool((found_D >= honest_CD.amin(0) - slack_D).all())
    assert bool((found_D <= honest_CD.amax(0) + slack_D).all())


@pytest.mark.parametrize(
    "part", [part for part in every_example("aggregators") if built(part).needs_individuals], ids=repr
)
def test_the_number_of_threads_changes_no_bit(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    all_C = updates(6, max(12, built(part).min_updates), size=10_000)
    found = []
    for cores, threads in ((1, 1), (2, 1), (3, 2)):
        monkeypatch.setattr("atoll.aggregators.columns.num_cores", lambda cores=cores: cores)
        torch.set_num_threads(threads)
        found.append(aggregated(part, all_C))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_mean_and_median_are_what_they_say() -> None:
    all_C = updates(3, 6)
    weights = all_C.weight / all_C.weight.sum()
    torch.testing.assert_close(aggregated(Part("mean"), all_C), (weights[:, None] * all_C.delta_D).sum(0))
    torch.testing.assert_close(aggregated(Part("median"), all_C), all_C.delta_D.quantile(0.5, dim=0))
    assert built(Part("median")).needs_individuals
    assert not built(Part("mean")).needs_individuals


@pytest.mark.parametrize("size", [1e3, 1e10, 1e20])
def test_one_update_moves_the_mean_by_its_size(size: float) -> None:
    all_C = updates(5, 12)
    before_D = aggregated(Part("mean"), all_C)
    all_C.delta_D[4] = size * torch.linspace(-1, 1, 7)
    assert float((aggregated(Part("mean"), all_C) - before_D).norm()) > size / 100


def test_wrapped_rules_keep_the_traits_of_what_they_wrap() -> None:
    def traits(name: str, **options: Any) -> tuple[bool, ...]:
        rule = built(Part(name, **options))
        return rule.bounded, rule.translation_equivariant, rule.rotation_equivariant, rule.order_sensitive

    assert traits("nnm", f=1, rule="mean") == (False, True, False, False)
    assert traits("nnm", f=1, rule={"name": "krum", "f": 1}) == (True, True, True, False)
    assert traits("nnm", f=1, rule={"name": "bucketing", "rule": "median"}) == (True, True, False, True)
    assert traits("sybils", rule="norm_clipping") == (True, False, True, False)
