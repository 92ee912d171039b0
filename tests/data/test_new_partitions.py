"""Partitions by classes and by quantity, mixtures, and how far from IID they are. Shapes: C clients, K classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset
from atoll.data.heterogeneity import earth_movers_distance, js_divergence, label_counts, weighted_mean
from atoll.data.index import Partition, dealt
from atoll.data.partition.classes import classes
from atoll.data.partition.dirichlet import dirichlet
from atoll.data.partition.iid import iid
from atoll.data.partition.mixture import dealer, mixture
from atoll.data.partition.quantity import quantity
from atoll.data.partition.similarity import similarity
from atoll.data.skew.rotation import rotation
from atoll.train.federation import build_federation

DIGITS = digits()
MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def counts_of(dataset: Dataset, partition: Partition) -> Any:
    return label_counts(partition, dataset.train_y, dataset.num_classes, range(partition.num_clients))


def with_counts(counts_K: list[int]) -> Dataset:
    y = np.repeat(np.arange(len(counts_K)), counts_K)
    x = np.zeros((len(y), 1), dtype=np.float32)
    return Dataset(name="counted", train_x=x, train_y=y, test_x=x[:1], test_y=y[:1], num_classes=len(counts_K))


@settings(deadline=None, max_examples=60)
@given(
    counts_K=st.lists(st.integers(30, 300), min_size=2, max_size=8),
    num_clients=st.integers(1, 25),
    classes_per_client=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    in_order=st.booleans(),
)
def test_every_client_has_exactly_so_many_classes(
    counts_K: list[int], num_clients: int, classes_per_client: int, seed: int, in_order: bool
) -> None:
    data = with_counts(counts_K)
    try:
        partition = classes(
            data, num_clients=num_clients, seed=seed, classes_per_client=classes_per_client, in_order=in_order
        )
    except PlanError as error:
        assert "set classes_per_client to at least" in str(error)
        assert not classes_per_client <= len(counts_K) <= num_clients * classes_per_client
        return
    counts_CK = counts_of(data, partition)
    assert ((counts_CK > 0).sum(axis=1) == classes_per_client).all()
    assert counts_CK.sum(axis=0).tolist() == counts_K
    assert np.ptp((counts_CK > 0).sum(axis=0)) <= 1


def test_classes_in_order_are_pairs_of_neighbours() -> None:
    data = with_counts([40] * 10)
    partition = classes(data, num_clients=20, seed=3, classes_per_client=2, in_order=True)
    held = [sorted(set(data.train_y[partition.indices(client)].tolist())) for client in range(20)]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]] * 4


def test_classes_are_equal_in_size_where_classes_are(make_toy: Callable[..., Dataset]) -> None:
    data = make_toy(num_per_class=100, num_classes=10)
    for classes_per_client in (1, 2, 5, 10):
        partition = classes(data, num_clients=50, seed=0, classes_per_client=classes_per_client)
        assert set(partition.sizes().tolist()) == {20}


@pytest.mark.parametrize("classes_per_client", [2, 3])
def test_classes_are_nearly_equal_in_size_where_classes_are_not(classes_per_client: int) -> None:
    data = with_counts(MNIST_COUNTS)
    partition = classes(data, num_clients=100, seed=0, classes_per_client=classes_per_client)
    assert np.ptp(partition.sizes()) <= 3
    counts_CK = counts_of(data, partition)
    assert counts_CK[counts_CK > 0].min() > 0.5 * 600 / classes_per_client


def test_classes_without_samples_are_assigned_to_no_client() -> None:
    partition = classes(with_counts([40, 0, 40, 0]), num_clients=4, seed=0)
    assert partition.sizes().tolist() == [20] * 4


@pytest.mark.parametrize(
    ("counts_K", "options", "message"),
    [
        ([9, 9, 9], {"num_clients": 2, "classes_per_client": 1}, "at least 2 and at most 3"),
        ([9, 9, 9], {"num_clients": 5, "classes_per_client": 4}, "at least 1 and at most 3"),
        ([2, 99], {"num_clients": 5}, "2 samples of class 0 of counted among 5 clients; lower num_clients"),
        (
            [9, 9, 9],
            {"num_clients": 5, "classes_per_client": 0},
            "classes: classes_per_client must be at least 1, got 0",
        ),
    ],
)
def test_classes_that_cannot_be_dealt_are_refused(counts_K: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Part("classes", **options).build("data.partition", with_counts(counts_K), seed=0)


def test_quantity_follows_its_power_law() -> None:
    sizes = quantity(with_counts([5000, 5000]), num_clients=20, seed=0, exponent=1.5).sizes()
    shares = np.arange(1, 21) ** -1.5
    assert sorted(sizes, reverse=True) == pytest.approx(1 + shares / shares.sum() * (10_000 - 20), abs=1.1)


def test_quantity_follows_its_log_normal_law() -> None:
    sizes = quantity(with_counts([500_000, 500_000]), num_clients=1000, seed=0, law="log_normal", sigma=1.2).sizes()
    assert np.log(sizes).std() == pytest.approx(1.2, rel=0.1)


def test_quantity_follows_its_dirichlet_law() -> None:
    data = with_counts([50_000, 50_000])
    sizes = quantity(data, num_clients=500, seed=0, law="dirichlet", alpha=0.5).sizes()
    # A share of Dir_C(a) has the mean 1/C and the variance (C - 1) / (C^2 (C a + 1)).
    assert sizes.std() / sizes.mean() == pytest.approx(np.sqrt(499 / 251), rel=0.15)


def test_quantity_keeps_labels_alike_and_its_promise_of_samples() -> None:
    data = with_counts([20_000] * 5)
    partition = quantity(data, num_clients=10, seed=0, exponent=2.0, min_samples=500)
    assert partition.sizes().min() >= 500 and partition.sizes().max() > 50_000
    assert js_divergence(counts_of(data, partition)).max() < 0.01
    with pytest.raises(PlanError, match="lower num_clients or min_samples"):
        quantity(data, num_clients=10, seed=0, min_samples=10_001)


def test_js_and_emd_of_equal_clients_are_zero() -> None:
    counts_CK = np.array([[5, 10, 15], [10, 20, 30], [0, 0, 0]])
    assert js_divergence(counts_CK) == pytest.approx([0, 0, 0], abs=1e-12)
    assert earth_movers_distance(counts_CK) == pytest.approx([0, 0, 0], abs=1e-12)


def test_js_and_emd_of_one_class_of_many() -> None:
    counts_CK = 7 * np.eye(500, dtype=np.int64)
    assert (js_divergence(counts_CK) > 0.98).all() and (js_divergence(counts_CK) <= 1).all()
    assert earth_movers_distance(counts_CK) == pytest.approx(np.full(500, 2 * (1 - 1 / 500)))


def test_js_and_emd_by_hand() -> None:
    counts_CK = np.array([[4, 0], [0, 4]])
    # p_k = (1, 0), p = (1/2, 1/2), m = (3/4, 1/4).
    by_hand = (np.log2(4 / 3) + 0.5 * np.log2(2 / 3) + 0.5 * np.log2(2)) / 2
    assert js_divergence(counts_CK) == pytest.approx([by_hand, by_hand])
    assert earth_movers_distance(counts_CK) == pytest.approx([1, 1])
    assert weighted_mean(np.array([1.0, 4.0]), np.array([[1, 1], [3, 1]])) == pytest.approx(3.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_js_and_emd_stay_in_range(counts: list[list[int]]) -> None:
    counts_CK = np.array([*counts, [1, 1, 1]])
    for distance_C, most in ((js_divergence(counts_CK), 1), (earth_movers_distance(counts_CK), 2)):
        assert distance_C.shape == (len(counts_CK),)
        assert (distance_C >= -1e-12).all() and (distance_C <= most).all()


def test_alpha_and_js_go_together() -> None:
    js = [
        weighted_mean(js_divergence(counts_CK), counts_CK)
        for alpha in (0.1, 1.0, 100.0)
        for counts_CK in [counts_of(DIGITS, dirichlet(DIGITS, num_clients=10, seed=0, alpha=alpha))]
    ]
    assert js[0] > 0.3 > js[1] > 0.02 > js[2]


def test_a_mixture_is_its_parts_one_after_the_other() -> None:
    parts = [{"name": "dirichlet", "alpha": 0.3, "num_clients": 6}, {"name": "rotation", "degrees": 20}]
    mixed = mixture(DIGITS, parts=parts, seed=5)
    by_hand = rotation(DIGITS, dirichlet(DIGITS, num_clients=6, seed=5, alpha=0.3), seed=5, degrees=20)
    assert mixed.dataset is not None and by_hand.dataset is not None
    assert (mixed.dataset.train_x == by_hand.dataset.train_x).all()
    assert all((mixed.indices(client) == by_hand.indices(client)).all() for client in range(6))


def test_skews_of_a_mixture_add_up() -> None:
    mixed = mixture(DIGITS, parts=["iid", "label_swap", "noise", "quantity"], num_clients=6, seed=0)
    now = mixed.dataset
    assert now is not None and mixed.num_clients == 6
    assert (now.train_x != DIGITS.train_x).any() and (now.train_y != DIGITS.train_y).any()
    assert np.ptp(mixed.sizes()) > 50


def test_the_first_part_says_how_many_clients_there_are() -> None:
    assert mixture(DIGITS, parts=["iid"], num_clients=7).num_clients == 7
    assert mixture(DIGITS, parts=[{"name": "iid", "num_clients": 3}], num_clients=7).num_clients == 3
    assert mixture(DIGITS, parts=["iid"]).num_clients == 10


def test_a_plan_runs_on_what_the_mixture_made() -> None:
    mixed = Part("iid", num_clients=5) | Part("label_swap", num_groups=2) | Part("quantity", law="log_normal")
    plan = Plan(data="digits", partition=mixed, seed=3)
    federation = build_federation(Plan.from_toml(plan.to_toml()))
    labels = federation.train_y.numpy()
    assert federation.num_clients == 5 and (labels != DIGITS.train_y).any()
    assert (federation.test_y.numpy() == DIGITS.test_y).all()
    assert np.ptp(federation.partition.sizes()) > 20


def forgetful(dataset: Dataset, partition: Partition, *, seed: int = 0) -> Partition:
    """A skew that deals anew and says nothing of the samples."""
    return dealt(partition.indices(0), np.array([0, partition.size(0)]))


def test_what_one_skew_changed_is_not_lost_by_the_next() -> None:
    mixed = mixture(DIGITS, parts=["iid", "rotation", Part(forgetful)], seed=0)
    assert mixed.num_clients == 1
    assert mixed.dataset is not None and (mixed.dataset.train_x != DIGITS.train_x).any()


def nothing(dataset: Dataset, partition: Partition, *, seed: int = 0) -> None:
    """No skew at all."""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"mixture: parts must be a partition and then skews, got \[\]: write parts = "),
        (3, r"mixture: parts\[0\] must be a name or a table with a name, got 3"),
        (["rotation", "iid"], r"'rotation' is a skew: .* Part\(\"iid\"\) \| Part\(\"rotation\"\)"),
        (["iid", "shards"], "'shards' deals data out, so it can only be the first part of a mixture; .* rotation"),
        (["iid", "rotate"], "no 'rotate' in data.skew: did you mean 'rotation'"),
        (["iid", {"name": "rotation", "degree": 3}], "rotation has no option 'degree': did you mean 'degrees'"),
        (["iid", {"degrees": 3}], r"parts\[1\] needs a name"),
        (["iid", Part(nothing)], "gave NoneType: make a partition with dealt"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Part("mixture", parts=parts, num_clients=4).build("data.partition", DIGITS)


def test_a_skew_alone_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"name = \"mixture\" and parts = \[\"iid\", \"label_swap\"\]"):
        dealer(Part("label_swap"))
    for name in ("iid", "quantity", "mixture", "my_pkg.my_mod:rule"):
        assert dealer(Part(name)).name == name


def test_two_mixtures_by_the_same_seed_are_the_same() -> None:
    first, second = (mixture(DIGITS, parts=["classes", "styles"], num_clients=8, seed=2) for _ in range(2))
    assert first.dataset is not None and second.dataset is not None
    assert (first.dataset.train_x == second.dataset.train_x).all()
    other = mixture(replace(DIGITS), parts=["classes", "styles"], num_clients=8, seed=3)
    assert other.dataset is not None and (other.dataset.train_x != first.dataset.train_x).any()
    assert iid(DIGITS, num_clients=8, seed=2).dataset is None


@pytest.mark.parametrize("gamma", [0.0, 0.33, 1.0])
def test_similarity_deals_a_share_iid_and_the_rest_by_label(gamma: float) -> None:
    partition = similarity(DIGITS, num_clients=10, gamma=gamma, seed=4)
    assert np.ptp(partition.sizes()) <= 2
    counts_CK = counts_of(DIGITS, partition)
    labels = [DIGITS.train_y[partition.indices(client)] for client in range(10)]
    ordered = [one[int(gamma * len(one)) + 1 :] for one in labels]
    assert (np.diff(np.concatenate(ordered).astype(int)) >= 0).all()  # sorted, from the first client to the last
    away = weighted_mean(js_divergence(counts_CK), counts_CK)
    low, high = {0.0: (0.6, 1.0), 0.33: (0.1, 0.5), 1.0: (0.0, 0.05)}[gamma]
    assert low < away < high


def test_similarity_refuses_shares_outside_0_to_1() -> None:
    with pytest.raises(
        PlanError, match=r"similarity: gamma must be in \[0, 1\], got 2; it is the share that is dealt IID"
    ):
        Part("similarity", gamma=2).build("data.partition", DIGITS)
