"""Label skew: groups of clients with permuted labels.

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
    """Exchange `num_classes_swapped` labels in each group of clients, by a permutation that no other group has.

    The permutation is a cycle of random labels. P(y|x) differs between groups, P(x) does not (Kairouz et al. 2021,
    arXiv:1912.04977, sec. 3.1, concept shift), so that no single model fits all groups.
    """
    disjoint(partition)
    rng = generator(seed, PURPOSE)
    group_C = random_groups(partition.num_clients, num_groups, rng)
    new_label_GK = _permutations(dataset, num_groups, num_classes_swapped, rng)
    labels_N = dataset.train_y.copy()
    for client, group in enumerate(group_C):
        held_S = partition.indices(client)
        labels_N[held_S] = new_label_GK[group, labels_N[held_S]]
    return changed(partition, replace(dataset, train_y=labels_N))


def _permutations(dataset: Dataset, num_groups: int, num_swapped: int, rng: np.random.Generator) -> Array:
    """Draw a distinct permutation of the labels for each group: the new label of each label, (G, K)."""
    if not dataset.has_classes:
        raise PlanError(f"label_swap exchanges classes, and the targets of {dataset.name} are none: use another skew")
    K = dataset.num_classes
    if num_swapped > K:
        raise PlanError(f"num_classes_swapped is {num_swapped}, but {dataset.name} has {K} classes: lower it")
    if math.comb(K, num_swapped) * math.factorial(num_swapped - 1) < num_groups:
        raise PlanError(
            f"there are fewer than {num_groups} ways to exchange {num_swapped} of the {K} labels of {dataset.name}, "
            "one for each group: lower num_groups or choose another num_classes_swapped"
        )
    permutations: dict[tuple[int, ...], None] = {}
    while len(permutations) < num_groups:
        chosen = rng.permutation(K)[:num_swapped]
        new_label_K = np.arange(K)
        new_label_K[chosen] = np.roll(chosen, 1)
        permutations[tuple(new_label_K.tolist())] = None
    return np.array(list(permutations))
