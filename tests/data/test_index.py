"""Partitions as such: dealt and drawn, and what they cost."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from atoll.core.errors import PlanError
from atoll.data.dataset import Dataset
from atoll.data.heterogeneity import label_counts
from atoll.data.index import dealt, drawn, even_offsets, joined
from atoll.data.partition.dirichlet import dirichlet
from atoll.data.partition.iid import iid


def test_dealt_gives_slices() -> None:
    partition = dealt(np.array([5, 3, 1, 0], dtype=np.int32), np.array([0, 1, 1, 4]))
    assert partition.num_clients == 3
    assert [partition.indices(c).tolist() for c in range(3)] == [[5], [], [3, 1, 0]]
    assert partition.indices(0).dtype == np.int64
    assert partition.sizes().tolist() == [1, 0, 3] == [partition.size(c) for c in range(3)]


@pytest.mark.parametrize("offsets", [[0], [0, 2], [1, 4], [0, 3, 2, 4]])
def test_dealt_refuses_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(PlanError, match="offsets must rise from 0 to the 4 samples"):
        dealt(np.arange(4), np.array(offsets))


@pytest.mark.parametrize("client", [-1, 3])
def test_unknown_clients_are_named(client: int) -> None:
    for partition in (dealt(np.arange(3), np.arange(4)), drawn(3, 2, lambda _: np.arange(2))):
        for method in (partition.indices, partition.size):
            with pytest.raises(PlanError, match=f"no client {client}: this partition has clients 0 to 2"):
                method(client)


def test_joined_clients_follow_those_of_the_first_partition() -> None:
    first = dealt(np.array([5, 3, 1, 0]), np.array([0, 1, 4]))
    partition = joined(first, drawn(2, 2, lambda client: np.array([4, client])))
    assert [partition.indices(c).tolist() for c in range(4)] == [[5], [3, 1, 0], [4, 0], [4, 1]]
    assert partition.sizes().tolist() == [1, 3, 2, 2] == [partition.size(c) for c in range(partition.num_clients)]
    with pytest.raises(PlanError, match="no client 4: this partition has clients 0 to 3"):
        partition.size(4)


def test_drawn_checks_what_was_drawn() -> None:
    with pytest.raises(PlanError, match=r"draw\(1\) returned shape \(3,\); it must return samples_per_client = 2"):
        drawn(2, 2, lambda _: np.arange(3)).indices(1)


@pytest.mark.parametrize("rule", [iid, dirichlet])
def test_a_million_clients_cost_next_to_nothing(rule: object, toy: Dataset) -> None:
    tracemalloc.start()
    start = time.process_time()
    partition = rule(toy, num_clients=1_000_000, seed=0, samples_per_client=20)  # type: ignore[operator]
    partition.indices(999_999)
    seconds = time.process_time() - start
    assert partition.sizes().sum() == 20_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 0.2 and peak < 20e6


def test_even_offsets_differ_by_one_at_most() -> None:
    assert np.diff(even_offsets(11, 4)).tolist() == [2, 3, 3, 3]


def test_label_counts_of_classes_and_of_sequences() -> None:
    partition = dealt(np.array([0, 1, 2, 3]), np.array([0, 1, 4]))
    labels = np.array([2, 0, 0, 1])
    assert label_counts(partition, labels, 3, [1, 0]).tolist() == [[2, 1, 0], [0, 0, 1]]
    sequences = np.array([[0, 1], [1, 1], [2, 2], [0, 2]])
    assert label_counts(partition, sequences, 3, np.array([0, 1])).tolist() == [[1, 1, 0], [1, 2, 3]]
