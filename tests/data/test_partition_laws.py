"""What every partition rule must satisfy; a new file in the folder is tested as soon as it exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import every_example

from atoll.core.errors import PlanError
from atoll.core.parts import Part, find
from atoll.data.dataset import Dataset
from atoll.data.index import Partition

Rule = Callable[..., Partition]


PARTS = {find("data.partition", part.name).__name__: part for part in every_example("data.partition")}


def rules() -> list[Rule]:
    found = [(find("data.partition", part.name), part.options) for part in PARTS.values()]
    return [wraps(rule)(partial(rule, **options)) for rule, options in found]


RULES = rules()
LAZY = [rule for rule in RULES if "samples_per_client" in inspect.signature(rule).parameters]
NUM_TRAIN = 200

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
every_lazy_rule = pytest.mark.parametrize("rule", LAZY, ids=lambda rule: rule.__name__)
seeds = st.integers(0, 2**63)


def built(rule: Rule, dataset: Dataset, **options: Any) -> Any:
    part = PARTS[rule.__name__]
    return Part(part.name, **part.options, **options).build("data.partition", dataset)


def parts(partition: Partition) -> list[list[int]]:
    return [partition.indices(client).tolist() for client in range(partition.num_clients)]


def test_the_folder_was_listed() -> None:
    assert {rule.__name__ for rule in RULES} >= {"iid", "shards", "dirichlet", "natural"}
    assert {rule.__name__ for rule in LAZY} >= {"iid", "dirichlet"}


@every_rule
def test_no_sample_has_two_clients_and_all_have_one(rule: Rule, toy: Dataset) -> None:
    partition = rule(toy, num_clients=12, seed=3)
    held = np.concatenate([partition.indices(client) for client in range(12)])
    assert sorted(held) == list(range(NUM_TRAIN))


@every_rule
@settings(deadline=None, max_examples=25)
@given(num_clients=st.integers(1, 12), seed=seeds)
def test_parts_are_disjoint_and_sizes_agree(rule: Rule, num_clients: int, seed: int, toy: Dataset) -> None:
    partition = rule(toy, num_clients=num_clients, seed=seed)
    held = parts(partition)
    assert partition.num_clients == num_clients == len(held)
    together = [index for part in held for index in part]
    assert len(set(together)) == len(together) and set(together) <= set(range(NUM_TRAIN))
    assert all(part for part in held)
    assert partition.sizes().tolist() == [len(part) for part in held] == [partition.size(c) for c in range(num_clients)]
    assert partition.sizes().dtype == partition.indices(0).dtype == np.int64


@every_rule
@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_the_seed_decides_and_nothing_else(rule: Rule, seed: int, toy: Dataset) -> None:
    first = parts(rule(toy, num_clients=5, seed=seed))
    np.random.default_rng().random()
    assert parts(rule(toy, num_clients=5, seed=seed)) == first
    others = [parts(rule(toy, num_clients=5, seed=seed + step)) for step in range(1, 4)]
    assert any(other != first for other in others)


@every_rule
@pytest.mark.parametrize("num_clients", [0, -3, 2.5, True, "3"])
def test_bad_numbers_of_clients_are_refused(rule: Rule, num_clients: Any, toy: Dataset) -> None:
    with pytest.raises(PlanError, match=r"num_clients must be .*in \[1, 1000000000\], got"):
        built(rule, toy, num_clients=num_clients, seed=0)


@every_rule
def test_bad_seeds_are_refused(rule: Rule, toy: Dataset) -> None:
    with pytest.raises(PlanError, match="seed must be 0 or more, got -1"):
        built(rule, toy, num_clients=2, seed=-1)


@every_rule
def test_more_clients_than_samples_are_refused_with_a_way_out(rule: Rule, toy: Dataset) -> None:
    with pytest.raises(PlanError, match=r"lower num_clients|samples_per_client"):
        rule(toy, num_clients=NUM_TRAIN + 1, seed=0)


@every_rule
def test_worker_processes_can_be_sent_a_partition(rule: Rule, toy: Dataset) -> None:
    partition = rule(toy, num_clients=4, seed=1)
    assert parts(ForkingPickler.loads(ForkingPickler.dumps(partition))) == parts(partition)


@every_lazy_rule
def test_worker_processes_can_be_sent_a_drawn_partition(rule: Rule, toy: Dataset) -> None:
    partition = rule(toy, num_clients=4, seed=1, samples_per_client=9)
    assert parts(ForkingPickler.loads(ForkingPickler.dumps(partition))) == parts(partition)


@every_lazy_rule
@settings(deadline=None, max_examples=25)
@given(samples_per_client=st.integers(1, NUM_TRAIN), client=st.integers(0, 10**6 - 1), seed=seeds)
def test_drawn_clients_hold_no_sample_twice(
    rule: Rule, samples_per_client: int, client: int, seed: int, toy: Dataset
) -> None:
    partition = rule(toy, num_clients=10**6, seed=seed, samples_per_client=samples_per_client)
    held = partition.indices(client)
    assert len(held) == samples_per_client == partition.size(client) == len(np.unique(held))
    assert held.min() >= 0 and held.max() < NUM_TRAIN
    assert (held == partition.indices(client)).all()


@every_lazy_rule
def test_drawn_clients_do_not_depend_on_how_many_there_are(rule: Rule, toy: Dataset) -> None:
    few = rule(toy, num_clients=10, seed=0, samples_per_client=15)
    many = rule(toy, num_clients=10_000, seed=0, samples_per_client=15)
    assert parts(few) == [many.indices(client).tolist() for client in range(10)]
    assert few.indices(0).tolist() != few.indices(1).tolist()


@every_lazy_rule
@pytest.mark.parametrize(("samples", "message"), [(0, "must be at least 1, got 0"), (201, "has 200 training samples")])
def test_bad_numbers_of_samples_are_refused(rule: Rule, samples: int, message: str, toy: Dataset) -> None:
    with pytest.raises(PlanError, match=f"samples_per_client .*{message}"):
        Part(rule.__name__, num_clients=2, samples_per_client=samples).build("data.partition", toy, seed=0)


def sequences() -> Dataset:
    tokens = np.zeros((20, 6), dtype=np.uint8)
    return Dataset(
        name="lines", train_x=tokens, train_y=tokens, test_x=tokens, test_y=tokens, num_classes=4, tokens=True,
        owners=np.arange(20) % 4,
    )  # fmt: skip


@every_rule
def test_sequences_are_dealt_or_refused_by_name(rule: Rule) -> None:
    try:
        partition = rule(sequences(), num_clients=4, seed=0)
    except PlanError as error:
        assert "use partition = 'natural' or 'iid'" in str(error)
    else:
        assert partition.sizes().sum() == 20
        assert rule.__name__ in ("iid", "natural", "quantity")
