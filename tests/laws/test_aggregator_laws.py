"""What every aggregator must satisfy. Shapes: C clients, D parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.aggregator import Aggregator
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, Update
from atoll.core.parts import Part, members

EVERY = members("aggregators")
F = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "bucketing": {"rule": "median"},
    "centered_clipping": {"tau": 1e6},
    "sybils": {"rule": "geometric_median"},
    "nnm": {"f": F, "rule": {"name": "trimmed_mean", "f": F}},
    **{
        name: {"f": F}
        for name in ("bulyan", "caf", "krum", "median_of_means", "minimum_diameter", "multi_krum", "trimmed_mean")
    },
}
LEAST = {
    "bulyan": 4 * F + 3,
    "caf": 2 * F + 1,
    "krum": 2 * F + 3,
    "median_of_means": 2 * F + 1,
    "minimum_diameter": 2 * F + 1,
    "multi_krum": 2 * F + 3,
    "nnm": 2 * F + 1,
    "trimmed_mean": 2 * F + 1,
}
"""The fewest updates for F bad clients, as papers say; 1 for the others."""
SHUFFLED = {"bucketing", "median_of_means"}
"""Rules that deal clients out at random: their order matters."""
TRANSLATES = set(EVERY) - {"majority", "norm_clipping", "fltrust", "centered_clipping"}
"""Rules that follow when all updates are moved by the same vector; the others measure from 0 or from the server."""
WITHIN_RANGE = {"median", "trimmed_mean", "bulyan", "nnm", "krum"}
"""Rules that promise every coordinate within the range of the honest ones, whatever F bad clients send."""
UNBOUNDED = {"mean"}


def updates(seed: int, num: int, size: int = 7) -> Update:
    made = torch.Generator().manual_seed(seed)
    weight_C = torch.randint(1, 20, (num,), generator=made).float()
    extra = {"extra": torch.randn(num, 3, generator=made), "number": torch.randn(num, generator=made)}
    return Update(torch.randn(num, size, generator=made), weight_C, extra)


def built(name: str, **changes: Any) -> Aggregator:
    rule: Aggregator = Part(name, **{**OPTIONS.get(name, {}), **changes}).build("aggregators", seed=3)
    return rule


def own(like: Update) -> Update:
    """The server's own update, for rules that compare with it: the same for all tests."""
    delta_D = torch.linspace(-1, 2, like.delta_D.shape[1])
    return Update(delta_D, torch.tensor(1.0), {"extra": torch.ones(3), "number": torch.tensor(1.0)})


def finished(rule: Aggregator, acc: Any, like: Update) -> Aggregate:
    acc = rule.add_server_update(acc, own(like)) if rule.add_server_update is not None else acc
    return rule.finish(acc, rule.init())[0]


def aggregated(rule: Aggregator, cohort: Update) -> Aggregate:
    return finished(rule, rule.add(rule.zero(), cohort), cohort)


def moved(cohort: Update, by_D: torch.Tensor) -> Update:
    return cohort._replace(delta_D=cohort.delta_D + by_D)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16), cut=st.integers(1, 3))
def test_folding_in_parts_equals_folding_at_once(name: str, seed: int, num: int, cut: int) -> None:
    rule, all_C = built(name), updates(seed, num)
    whole = aggregated(rule, all_C)
    first, second = all_C.rows(torch.arange(cut)), all_C.rows(torch.arange(cut, num))
    parts = finished(rule, rule.merge(rule.add(rule.zero(), first), rule.add(rule.zero(), second)), all_C)
    torch.testing.assert_close(whole.delta_D, parts.delta_D, atol=1e-5, rtol=1e-4)
    for extra in ("extra", "number"):
        torch.testing.assert_close(whole.aux[extra], parts.aux[extra], atol=1e-5, rtol=1e-4)
        assert whole.aux[extra].shape == all_C.aux[extra].shape[1:]
    assert (whole.num_clients, whole.weight) == (num, pytest.approx(float(all_C.weight.sum())))


@pytest.mark.parametrize("name", sorted(set(EVERY) - SHUFFLED))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16))
def test_a_permutation_changes_nothing(name: str, seed: int, num: int) -> None:
    rule, all_C = built(name), updates(seed, num)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    before, after = aggregated(rule, all_C), aggregated(rule, all_C.rows(order))
    torch.testing.assert_close(before.delta_D, after.delta_D, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(TRANSLATES))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16), far=st.floats(-100, 100))
def test_moving_all_updates_moves_the_result_as_far(name: str, seed: int, num: int, far: float) -> None:
    rule, all_C = built(name), updates(seed, num)
    by_D = far * torch.linspace(-1, 1, all_C.delta_D.shape[1])
    torch.testing.assert_close(
        aggregated(rule, moved(all_C, by_D)).delta_D, aggregated(rule, all_C).delta_D + by_D, atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("name", sorted(name for name in EVERY if built(name).rotation_equivariant))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16))
def test_rules_that_turn_go_by_lengths_and_angles_alone(name: str, seed: int, num: int) -> None:
    rule, all_C = built(name), updates(seed, num)
    turn_DD = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(seed))).Q
    turned = all_C._replace(delta_D=all_C.delta_D @ turn_DD)
    expected_D = aggregated(rule, all_C).delta_D @ turn_DD
    torch.testing.assert_close(aggregated(rule, turned).delta_D, expected_D, atol=1e-4, rtol=1e-4)
    kept = rule.finish(rule.add(rule.zero(), all_C), rule.init())[1]
    assert all(value.dim() == 0 for value in kept.values())  # no vector is remembered that would have to turn too


@pytest.mark.parametrize("name", sorted(WITHIN_RANGE))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(11, 16), size=st.sampled_from([0.1, 1.0, 3.0, 100.0, 1e20, 3e38]))
def test_coordinates_stay_within_the_range_of_the_honest(name: str, seed: int, num: int, size: float) -> None:
    all_C = updates(seed, num)
    honest_CD = all_C.delta_D[F:].clone()
    all_C.delta_D[:F] = (size * all_C.delta_D[:F] / all_C.delta_D[:F].abs().max()).clamp(-3.4e38, 3.4e38)
    if name == "krum" and size <= 3:
        return  # krum may take a bad update that lies among the honest: it promises one that is near them
    found_D = aggregated(built(name), all_C).delta_D
    slack = 1e-4
    assert bool((found_D >= honest_CD.amin(0) - slack).all())
    assert bool((found_D <= honest_CD.amax(0) + slack).all())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", [1e3, 1e10, 1e20, 3e38])
def test_one_outlier_however_large_moves_the_result_by_a_bounded_amount(name: str, size: float) -> None:
    rule, all_C = built(name, **({"tau": 3.0} if name == "centered_clipping" else {})), updates(5, 12)
    before_D = aggregated(rule, all_C).delta_D
    all_C.delta_D[4] = size * torch.linspace(-1, 1, all_C.delta_D.shape[1])
    all_C.aux["extra"][4] = size
    after = aggregated(rule, all_C)
    far = float((after.delta_D - before_D).norm())
    if name in UNBOUNDED:
        assert far > size / 100
    else:
        assert far < 4  # honest updates have a norm of about sqrt(7)
        assert bool(after.aux["extra"].isfinite().all())


@pytest.mark.parametrize("name", EVERY)
def test_equal_updates_aggregate_to_themselves(name: str) -> None:
    rule, one = built(name), updates(1, 1)
    same = one.rows(torch.zeros(12, dtype=torch.long))
    expected_D = one.delta_D[0]
    if name == "majority":
        expected_D = expected_D.sign()  # a vote has no magnitude
    if name == "fltrust":
        same, expected_D = same._replace(delta_D=own(same).delta_D.expand(12, -1)), own(same).delta_D
    torch.testing.assert_close(aggregated(rule, same).delta_D, expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_fewer_updates_than_the_least_are_refused(name: str) -> None:
    least, rule = LEAST.get(name, 1), built(name)
    assert rule.min_updates == least
    assert aggregated(rule, updates(2, least)).delta_D.isfinite().all()
    if least > 1:
        with pytest.raises(PlanError, match=rf"needs at least .*{least} updates: got {least - 1}; lower f, or ask"):
            aggregated(rule, updates(2, least - 1))


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"mean", "fltrust"}))
def test_weights_are_ignored(name: str) -> None:
    all_C = updates(4, 12)
    liar = all_C._replace(weight=all_C.weight * torch.tensor([1e6] + [1.0] * 11))
    assert torch.equal(aggregated(built(name), all_C).delta_D, aggregated(built(name), liar).delta_D)


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"mean", "majority"}))
def test_the_number_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_C = updates(6, 12, size=10_000)
    found = []
    for cores, threads in ((1, 1), (2, 1), (3, 2)):
        monkeypatch.setattr("atoll.aggregators.columns.num_cores", lambda cores=cores: cores)
        torch.set_num_threads(threads)
        found.append(aggregated(built(name), all_C).delta_D)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_mean_and_median_are_what_they_say() -> None:
    all_C = updates(3, 6)
    weights = all_C.weight / all_C.weight.sum()
    torch.testing.assert_close(aggregated(built("mean"), all_C).delta_D, (weights[:, None] * all_C.delta_D).sum(0))
    torch.testing.assert_close(aggregated(built("median"), all_C).delta_D, all_C.delta_D.quantile(0.5, dim=0))
    assert built("median").needs_individuals
    assert not built("mean").needs_individuals
