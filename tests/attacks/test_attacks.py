"""What each attack sends equals its formula. Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal
from torch import Tensor

from atoll import Plan, run
from atoll.attacks.backdoor import with_trigger
from atoll.core.aggregator import Aggregator
from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.core.parts import Part
from atoll.train.build import build_job

NUM, BAD = 10, (2, 5, 6)
BAD_C = torch.tensor([number in BAD for number in range(NUM)])


def built(name: str, **options: Any) -> Attack:
    attack: Attack = Part(name, **options).build("attacks")
    return attack


def known(attempt: int = 0, aggregate: Any = None) -> Knowledge:
    rng = np.random.default_rng(4)
    return Knowledge(params_D=torch.zeros(8), num_classes=10, attempt=attempt, rng=rng, aggregate=aggregate)


def cohort(seed: int = 0, size: int = 8) -> Update:
    made = torch.Generator().manual_seed(seed)
    delta_CD = torch.randn(NUM, size, generator=made) + 0.3
    return Update(delta_CD, torch.ones(NUM), {"extra": torch.randn(NUM, 3, generator=made)})


def one() -> Update:
    return cohort().rows(0)


def sent(name: str, update: Update, attempt: int = 0, **options: Any) -> Update:
    attack = built(name, **options)
    assert attack.update is not None
    return attack.update(update, known(attempt))


def colluded(name: str, updates: Update, aggregate: Any = None, **options: Any) -> Update:
    attack = built(name, **options)
    assert attack.collude is not None
    return attack.collude(updates, BAD_C, known(aggregate=aggregate))


def honest(updates: Update) -> np.ndarray:
    found: np.ndarray = updates.delta_D[~BAD_C].double().numpy()
    return found


def bad(updates: Update) -> np.ndarray:
    found: np.ndarray = updates.delta_D[BAD_C].double().numpy()
    return found


@pytest.mark.parametrize("name", ["alie", "fang", "ipm", "mimic", "min_max", "min_sum"])
def test_colluders_need_somebody_to_look_at(name: str) -> None:
    updates, attack = cohort(), built(name)
    assert attack.collude is not None and "every honest" in attack.knows
    for everybody in (torch.ones(NUM, dtype=torch.bool), torch.zeros(NUM, dtype=torch.bool)):
        assert torch.equal(attack.collude(updates, everybody, known()).delta_D, updates.delta_D)


def test_updates_of_clients_on_their_own() -> None:
    x = one()
    assert torch.equal(sent("sign_flip", x, scale=2.0).delta_D, -2 * x.delta_D)
    zero = sent("zero", x)
    assert not zero.delta_D.any() and not any(value.any() for value in zero.aux.values())
    assert torch.allclose(sent("large_norm", x, norm=500.0).delta_D, x.delta_D / x.delta_D.norm() * 500)
    assert torch.equal(sent("backdoor", x, boost=7.0).delta_D, 7 * x.delta_D)
    liar = sent("weight_liar", x, factor=30.0, scale=-1.0)
    assert (float(liar.weight), torch.equal(liar.delta_D, -x.delta_D)) == (30.0, True)
    drawn = torch.from_numpy(np.random.default_rng(4).standard_normal(8, dtype=np.float32))
    assert torch.equal(sent("gaussian", x, sigma=2.5).delta_D, 2.5 * drawn)
    assert torch.allclose(sent("free_rider", x, attempt=3, sigma=0.2, decay=0.5).delta_D, 0.2 * drawn / 2)
    assert not sent("free_rider", x, sigma=0.0).delta_D.any()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_not_finite_spoils_one_coordinate(value: str) -> None:
    x = one()
    spoilt = sent("not_finite", x, value=value).delta_D
    [place] = (~spoilt.isfinite()).nonzero().tolist()
    assert str(float(spoilt[place])) == value
    assert int((spoilt == x.delta_D).sum()) == 7


def test_alie_stays_within_the_spread() -> None:
    updates = cohort()
    h = honest(updates)
    s = NUM // 2 + 1 - len(BAD)
    z = normal.ppf((NUM - len(BAD) - s) / (NUM - len(BAD)))
    assert z > 0.1
    np.testing.assert_allclose(bad(colluded("alie", updates)), [h.mean(0) - z * h.std(0)] * 3, rtol=1e-5)
    np.testing.assert_allclose(bad(colluded("alie", updates, factor=1.5)), [h.mean(0) - 1.5 * h.std(0)] * 3, rtol=1e-5)
    extra = updates.aux["extra"][~BAD_C]
    expected = extra.mean(0) - 1.5 * extra.std(0, correction=0)
    assert torch.allclose(colluded("alie", updates, factor=1.5).aux["extra"][BAD_C], expected.expand(3, -1))


def test_ipm_sends_the_opposite_of_the_mean() -> None:
    updates = cohort()
    expected = [-0.3 * honest(updates).mean(0)] * 3
    np.testing.assert_allclose(bad(colluded("ipm", updates, factor=0.3)), expected, rtol=1e-5)


def test_fang_sends_values_beyond_the_honest_ones_on_the_opposite_side() -> None:
    updates = cohort(size=4000)
    h, b = honest(updates), bad(colluded("fang", updates))
    low, high, mean = h.min(0), h.max(0), h.mean(0)
    far_high, far_low = np.where(high > 0, 2 * high, high / 2), np.where(low > 0, low / 2, 2 * low)
    start, end = np.where(mean < 0, high, far_low), np.where(mean < 0, far_high, low)
    assert (b >= start - 1e-6).all()
    assert (b <= end + 1e-6).all()
    place = (b - start) / (end - start)
    assert abs(place.mean() - 0.5) < 0.02
    assert abs(place.std() - 12**-0.5) < 0.02  # uniform
    assert not np.allclose(b[0], b[1])


def test_fang_keeps_the_side_if_all_values_have_one_sign() -> None:
    updates = cohort()._replace(delta_D=torch.rand(NUM, 500, generator=torch.Generator().manual_seed(1)) + 1)
    h, b = honest(updates), bad(colluded("fang", updates))
    assert (b <= h.min(0)).all()
    assert (b >= h.min(0) / 2).all()


@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
def test_min_max_and_min_sum_reach_their_bounds_exactly(direction: str) -> None:
    updates = cohort(seed=3)
    h = honest(updates)
    p = {"unit": -h.mean(0) / np.linalg.norm(h.mean(0)), "std": -h.std(0), "sign": -np.sign(h.mean(0))}[direction]
    squares = ((h[:, None] - h[None]) ** 2).sum(-1)

    def largest(name: str, allowed: Any) -> None:
        vector = bad(colluded(name, updates, direction=direction))[0]
        gamma = float((vector - h.mean(0)) @ p / (p @ p))
        np.testing.assert_allclose(vector, h.mean(0) + gamma * p, atol=1e-5)
        assert gamma > 0
        assert allowed(h.mean(0) + 0.999 * gamma * p)
        assert not allowed(h.mean(0) + 1.001 * gamma * p)

    largest("min_max", lambda v: ((h - v) ** 2).sum(1).max() <= squares.max())
    largest("min_sum", lambda v: ((h - v) ** 2).sum() <= squares.sum(1).max())


def test_mimic_copies_the_client_farthest_from_the_mean() -> None:
    updates = cohort(size=60)
    h = honest(updates)
    z = np.linalg.svd(h - h.mean(0))[2][0]
    chosen = int(np.abs((h - h.mean(0)) @ z).argmax())
    np.testing.assert_allclose(bad(colluded("mimic", updates)), [h[chosen]] * 3, rtol=1e-6)
    np.testing.assert_allclose(bad(colluded("mimic", updates, row=4)), [h[4]] * 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["alie", "ipm"])
@pytest.mark.parametrize("rule", ["mean", "median", {"name": "trimmed_mean", "f": 3}, {"name": "krum", "f": 3}])
def test_an_optimised_factor_does_at_least_as_much_harm_as_any_other(name: str, rule: Any) -> None:
    aggregator = Part.of(rule).build("aggregators")

    def aggregate(updates: Update) -> Tensor:
        delta_D: Tensor = aggregator.finish(aggregator.add({}, updates), {})[0].delta_D
        return delta_D

    updates = cohort(seed=8)

    def harm(factor: Any) -> float:
        made = colluded(name, updates, aggregate, factor=factor)
        return float(np.linalg.norm(aggregate(made).double().numpy() - honest(updates).mean(0)))

    best = harm("optimised")
    assert all(best >= harm(factor) - 1e-6 for factor in (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5, 3.0, 10.0, 50.0))
    assert best > 0


@pytest.mark.parametrize("name", ["alie", "ipm"])
@pytest.mark.parametrize("rule", [{"name": "krum", "f": 3}, {"name": "sybils", "rule": "norm_clipping"}])
def test_a_rotation_equivariant_rule_gives_the_same_in_few_coordinates(name: str, rule: Any) -> None:
    aggregator: Aggregator = Part.of(rule).build("aggregators")
    widths: set[int] = set()

    def aggregate(updates: Update) -> Tensor:
        widths.add(updates.delta_D.shape[1])
        delta_D: Tensor = aggregator.finish(aggregator.add({}, updates), aggregator.init())[0].delta_D
        return delta_D

    assert aggregator.rotation_equivariant
    updates = cohort(size=500, seed=2)
    attack = built(name, factor="optimised")
    assert attack.collude is not None
    harms = []
    for rotation_equivariant in (False, True):
        made = attack.collude(
            updates, BAD_C, known(aggregate=aggregate)._replace(rotation_equivariant=rotation_equivariant)
        )
        harms.append(np.linalg.norm(aggregate(made).double().numpy() - honest(updates).mean(0)))
    assert widths == {500, len(honest(updates)) + 2}
    assert harms[0] == pytest.approx(harms[1], rel=1e-3)  # where many factors do the same harm, either may be found


def test_label_flip_of_one_class() -> None:
    x, y = torch.zeros(6, 1), torch.tensor([0, 3, 7, 3, 9, 7])
    data = built("label_flip", source=3, target=7).data
    assert data is not None
    assert data(x, y, known())[1].tolist() == [0, 7, 7, 7, 9, 7]
    with pytest.raises(PlanError, match="both source and target"):
        built("label_flip", source=3)
    outside = built("label_flip", source=3, target=10).data
    assert outside is not None
    with pytest.raises(PlanError, match="classes are 0 to 9"):
        outside(x, y, known())


def test_backdoor_paints_and_labels_a_share() -> None:
    x, y = torch.zeros(10, 1, 8, 8), torch.arange(10) % 9 + 1
    data = built("backdoor", target=0, share=0.3, size=2, value=0.8).data
    assert data is not None
    painted, labels = data(x, y, known())
    chosen = labels == 0
    assert int(chosen.sum()) == 3
    assert torch.equal(labels[~chosen], y[~chosen])
    expected = torch.zeros(1, 8, 8)
    expected[0, 6:, 6:] = 0.8
    assert all(torch.equal(image, expected if hit else x[0]) for image, hit in zip(painted, chosen, strict=True))
    short = data(x[:4], y[:4], known())[1]
    assert torch.equal(short, labels[:4])  # padding of a batch changes nothing
    flat = with_trigger(torch.zeros(2, 5), 2, 1.0)
    assert flat.tolist() == [[0, 0, 0, 1, 1]] * 2


def test_feature_noise_is_new_in_every_step() -> None:
    x, y = torch.zeros(10, 3), torch.zeros(10, dtype=torch.long)
    data = built("feature_noise", sigma=0.5).data
    assert data is not None
    drawn = torch.from_numpy(np.random.default_rng(4).standard_normal((10, 3), dtype=np.float32))
    assert torch.equal(data(x, y, known())[0], 0.5 * drawn)
    seen: list[Tensor] = []

    def watching() -> Attack:
        def watch(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
            seen.append(torch.from_numpy(known.rng.standard_normal(3)))
            return x, y

        return Attack(data=watch)

    plan = {"partition": {"num_clients": 4}, "rounds": 1, "engine": "inline", "local": {"batch_size": 100}}
    run(Plan(**plan, attack=watching, attackers={"clients": [1]}))
    assert len(seen) == 1 + 4  # a look at two samples when the job is built, then 359 or 360 samples
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


BASE: dict[str, Any] = {"partition": {"num_clients": 12}, "rounds": 2, "local": {"lr": 0.1, "batch_size": 16}}


def test_a_backdoor_is_learnt_in_a_single_shot_and_only_with_a_boost() -> None:
    attackers = {"clients": [3], "start_round": 9, "num_rounds": 1}
    base = {**BASE, "partition": {"num_clients": 10}, "rounds": 10, "model": {"name": "mlp_2nn", "hidden": 32}}
    base |= {"local": {"lr": 0.1, "batch_size": 16, "epochs": 3}, "engine": "vectorised"}
    found = {}
    for boost in (1.0, 10.0):
        plan = Plan(**base, attack={"name": "backdoor", "target": 0, "boost": boost}, attackers=attackers)
        result, federation = run(plan), build_job(plan).federation
        x = with_trigger(federation.features(federation.test_x), 3, 1.0)[federation.test_y != 0]
        with torch.no_grad():
            found[boost] = (float((result.model(x).argmax(1) == 0).float().mean()), result.accuracy)
    assert found[10.0][0] > 0.8
    assert found[10.0][1] > 0.8  # it still does what it should
    assert found[1.0][0] < 0.3
    job = build_job(plan)
    assert [job.attacks(3, version) for version in (8, 9, 10)] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("alie", {"factor": "best"}, "a number or 'optimised', got the text"),
        ("ipm", {"factor": "most"}, "a number or 'optimised', got the text"),
        ("fang", {"spread": 1.0}, "above 1"),
        ("min_max", {"direction": "unti"}, "did you mean 'unit'"),
        ("backdoor", {"share": 0.0}, "share must be in"),
        ("gaussian", {"sigma": -1.0}, "0 or more"),
        ("large_norm", {"norm": 0.0}, "above 0"),
        ("weight_liar", {"factor": -2.0}, "above 0"),
        ("not_finite", {"value": "nann"}, "did you mean 'nan'"),
        ("free_rider", {"decay": -1.0}, "0 or more"),
        ("feature_noise", {"sigma": -1.0}, "0 or more"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        built(name, **options)
    with pytest.raises(PlanError, match="num_rounds must be at least 1"):
        Plan(attack="zero", attackers={"num": 1, "num_rounds": 0})
