"""What sets each partition rule apart, in numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.data.dataset import Dataset
from atoll.data.heterogeneity import label_counts
from atoll.data.index import Partition
from atoll.data.partition.dirichlet import dirichlet
from atoll.data.partition.iid import iid
from atoll.data.partition.natural import WITH_OWNERS, natural
from atoll.data.partition.shards import shards


def classes_seen(dataset: Dataset, partition: Partition) -> Any:
    counts_CK = label_counts(partition, dataset.train_y, dataset.num_classes, range(partition.num_clients))
    return counts_CK, (counts_CK > 0).sum(axis=1)


def test_iid_deals_near_equal_parts(toy: Dataset) -> None:
    assert sorted(iid(toy, num_clients=7, seed=0).sizes()) == [28, 28, 28, 29, 29, 29, 29]


def test_iid_refuses_empty_clients(toy: Dataset) -> None:
    with pytest.raises(PlanError, match="at most 200 clients, or set samples_per_client so that clients may overlap"):
        iid(toy, num_clients=201, seed=0)


def test_shards_limit_the_classes_of_a_client(toy: Dataset) -> None:
    counts_CK, seen_C = classes_seen(toy, shards(toy, num_clients=10, seed=0))
    assert seen_C.max() == 2 and (counts_CK.sum(axis=1) == 20).all()
    assert (counts_CK % 10 == 0).all()
    _, seen_C = classes_seen(toy, shards(toy, num_clients=5, seed=0, shards_per_client=1))
    assert sorted(seen_C) == [1, 1, 1, 1, 1]


def test_shards_spread_the_remainder(toy: Dataset) -> None:
    sizes = shards(toy, num_clients=9, seed=0).sizes()
    assert sizes.sum() == 200 and sizes.max() - sizes.min() <= 2


def test_shards_that_do_not_fit_are_refused(toy: Dataset) -> None:
    with pytest.raises(PlanError, match=r"into 300 shards \(100 clients x 3\); lower num_clients or shards_per_client"):
        shards(toy, num_clients=100, seed=0, shards_per_client=3)


def mean_entropy(counts_CK: Any) -> float:
    shares_CK = counts_CK / counts_CK.sum(axis=1, keepdims=True)
    return float(-(shares_CK * np.log(np.where(shares_CK > 0, shares_CK, 1))).sum(axis=1).mean())


def test_alpha_sets_the_skew(make_toy: Callable[..., Dataset]) -> None:
    data = make_toy(num_per_class=4000, num_classes=10)
    entropy = [
        mean_entropy(classes_seen(data, dirichlet(data, num_clients=50, seed=0, alpha=alpha, min_samples=1))[0])
        for alpha in (0.05, 0.5, 5.0, 500.0)
    ]
    assert entropy == sorted(entropy)
    assert entropy[0] < 0.8 and entropy[-1] > 0.999 * np.log(10)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dealt_and_drawn_clients_are_equally_skewed(make_toy: Callable[..., Dataset], alpha: float) -> None:
    data = make_toy(num_per_class=6000, num_classes=10)
    dealt_C = dirichlet(data, num_clients=300, seed=0, alpha=alpha)
    drawn_C = dirichlet(data, num_clients=300, seed=0, alpha=alpha, samples_per_client=200)
    dealt_entropy, drawn_entropy = (mean_entropy(classes_seen(data, partition)[0]) for partition in (dealt_C, drawn_C))
    assert dealt_entropy == pytest.approx(drawn_entropy, rel=0.06)


def test_drawn_dirichlet_moves_on_when_a_class_runs_out(toy: Dataset) -> None:
    partition = dirichlet(toy, num_clients=20, seed=0, alpha=0.001, samples_per_client=90)
    counts_CK, _ = classes_seen(toy, partition)
    assert (counts_CK.sum(axis=1) == 90).all() and counts_CK.max() == 40


def test_dirichlet_keeps_its_promise_of_samples(toy: Dataset) -> None:
    assert dirichlet(toy, num_clients=10, seed=0, alpha=0.5, min_samples=8).sizes().min() >= 8
    assert dirichlet(toy, num_clients=150, seed=0, alpha=0.1, min_samples=0).sizes().min() == 0


def test_dirichlet_says_when_there_is_no_such_deal(toy: Dataset) -> None:
    with pytest.raises(PlanError, match="raise alpha, ask for fewer clients, lower min_samples"):
        dirichlet(toy, num_clients=100, seed=0, alpha=0.01)
    with pytest.raises(PlanError, match="cannot give 30 clients 10 samples each: toy has 200"):
        dirichlet(toy, num_clients=30, seed=0, min_samples=10)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf"), "0.5", True])
def test_bad_alpha_is_refused(toy: Dataset, alpha: Any) -> None:
    with pytest.raises(PlanError, match=r"dirichlet: alpha must be (a number |a finite number )?above 0, got"):
        Part("dirichlet", num_clients=5, alpha=alpha).build("data.partition", toy, seed=0)


def test_a_class_without_samples_is_allowed() -> None:
    x, y = np.zeros((60, 1), dtype=np.float32), np.repeat([0, 2], 30)
    data = Dataset(name="gap", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=4)
    assert dirichlet(data, num_clients=4, seed=0).sizes().sum() == 60
    assert dirichlet(data, num_clients=4, seed=0, samples_per_client=45).indices(3).max() < 60
    assert shards(data, num_clients=4, seed=0).sizes().sum() == 60


def test_natural_keeps_owners_whole_and_in_order(toy: Dataset) -> None:
    assert toy.owners is not None
    partition = natural(toy, seed=0)
    assert partition.num_clients == 12
    for client in range(12):
        assert partition.indices(client).tolist() == np.flatnonzero(toy.owners == client).tolist()


def test_natural_leaves_out_small_owners(toy: Dataset) -> None:
    assert toy.owners is not None
    sizes = np.bincount(toy.owners)
    wanted = int(np.median(sizes))
    assert natural(toy, seed=0, min_samples=wanted).num_clients == (sizes >= wanted).sum()
    with pytest.raises(PlanError, match="lower num_clients or min_samples"):
        natural(toy, seed=0, min_samples=1000)


def test_natural_needs_owners() -> None:
    x, y = np.zeros((4, 1), dtype=np.float32), np.array([0, 1, 0, 1])
    data = Dataset(name="bare", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2)
    with pytest.raises(PlanError, match=f"bare has none.*data that has owners: {', '.join(WITH_OWNERS)}"):
        natural(data, seed=0)


def test_deals_are_the_same_on_every_machine(toy: Dataset) -> None:
    """Fixed digests: if one moves, every published run with this rule and seed can no longer be repeated."""
    made = {
        "iid": iid(toy, num_clients=6, seed=1),
        "iid drawn": iid(toy, num_clients=6, seed=1, samples_per_client=30),
        "shards": shards(toy, num_clients=6, seed=1),
        "dirichlet": dirichlet(toy, num_clients=6, seed=1),
        "dirichlet drawn": dirichlet(toy, num_clients=6, seed=1, samples_per_client=30),
        "natural": natural(toy, num_clients=6, seed=1),
    }
    digests = {
        name: hashlib.sha256(
            b"".join(partition.indices(c).astype("<i8").tobytes() for c in range(6)) + partition.sizes().tobytes()
        ).hexdigest()[:16]
        for name, partition in made.items()
    }
    assert digests == DIGESTS


DIGESTS = {
    "iid": "b82d1829d307658b",
    "iid drawn": "da9f7a1cdc7540d7",
    "shards": "8cf93a5189747639",
    "dirichlet": "79247f9b4a3f4ce7",
    "dirichlet drawn": "b2dc69009479494a",
    "natural": "e1c8b5540e1a268d",
}
