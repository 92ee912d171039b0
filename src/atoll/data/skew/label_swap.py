"""Same features, different labels: groups of clients call alike things by other names.

Shapes: C clients, G groups, K classes, N training samples, S samples of a client.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Seed, at_least
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, changed, disjoint, generator
from atoll.data.shares import Groups, random_groups

PURPOSE = 116


def label_swap(
    dataset: Dataset,
    partition: Partition,
    *,
    seed: Seed = 0,
    num_groups: Groups = 2,
    num_classes_swapped: Annotated[int, at_least(2)] = 2,
) -> Partition:
    """Let each group of clients exchange `num_classes_swapped` labels by a permutation that no other group has.

    A group draws its labels and moves each of them (a cycle). P(y|x) differs from group to group, P(x) does not
    (Kairouz et al. 2021, arXiv:1912.04977, sec. 3.1, concept shift), so no one model can be right for all.
    """
    disjoint(partition)
    rng = generator(seed, PURPOSE)
    group_C = random_groups(partition.num_clients, num_groups, rng)
    names_GK = _permutations(dataset, num_groups, num_classes_swapped, rng)
    labels_N = dataset.train_y.copy()
    for client, group in enumerate(group_C):
        held_S = partition.indices(client)
        labels_N[held_S] = names_GK[group, labels_N[held_S]]
    return changed(partition, replace(dataset, train_y=labels_N))


def _permutations(dataset: Dataset, num_groups: int, num_swapped: int, rng: np.random.Generator) -> Array:
    """The new label of each label in each group, (G, K), all groups different."""
    K = dataset.num_classes
    if num_swapped > K:
        raise PlanError(f"num_classes_swapped is {num_swapped}, but {dataset.name} has {K} classes: lower it")
    if math.comb(K, num_swapped) * math.factorial(num_swapped - 1) < num_groups:
        raise PlanError(
            f"{num_groups} groups cannot each have their own way to exchange {num_swapped} of the {K} labels of "
            f"{dataset.name}: lower num_groups or choose another num_classes_swapped"
        )
    found: dict[tuple[int, ...], None] = {}
    while len(found) < num_groups:
        chosen = rng.permutation(K)[:num_swapped]
        names_K = np.arange(K)
        names_K[chosen] = np.roll(chosen, 1)
        found[tuple(names_K.tolist())] = None
    return np.array(list(found))
