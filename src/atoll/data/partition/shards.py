"""Pathological label skew. Shapes: N training samples, P shards."""

from __future__ import annotations

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition, class_labels, dealt, even_offsets, generator

PURPOSE = 102


def shards(dataset: Dataset, *, num_clients: Clients = 100, seed: Seed = 0, shards_per_client: Count = 2) -> Partition:
    """Sort by label, cut into equal shards and give each client a few (McMahan et al. 2017, arXiv:1602.05629, sec. 3).

    A client then has about `shards_per_client` classes. Shards that cannot be equal differ by one sample.
    """
    labels_N = class_labels("shards", dataset)
    num_shards = num_clients * shards_per_client
    if num_shards > dataset.num_train:
        raise PlanError(
            f"shards cannot cut the {dataset.num_train} training samples of {dataset.name} into {num_shards} shards "
            f"({num_clients} clients x {shards_per_client}); lower num_clients or shards_per_client"
        )
    rng = generator(seed, PURPOSE)
    shuffled_N = rng.permutation(dataset.num_train)
    sorted_N = shuffled_N[np.argsort(labels_N[shuffled_N], kind="stable")]
    cuts = even_offsets(dataset.num_train, num_shards)
    shuffled_P = rng.permutation(num_shards)
    samples_N = np.concatenate([sorted_N[cuts[shard] : cuts[shard + 1]] for shard in shuffled_P])
    ends_P = np.cumsum(np.diff(cuts)[shuffled_P])
    return dealt(samples_N, np.concatenate([[0], ends_P[shards_per_client - 1 :: shards_per_client]]))
