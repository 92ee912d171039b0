"""A bound on the samples of each client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.core.options import Count, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Partition, disjoint, generator

PURPOSE = 117


def at_most(dataset: Dataset, partition: Partition, *, seed: Seed = 0, samples: Count = 10) -> Partition:
    """Keep at most `samples` samples of each client, drawn at random; the others are not used.

    It makes a federation of clients that have little data out of a large data set.
    """
    parts = disjoint(partition)
    kept = [
        generator(seed, PURPOSE, client).permutation(parts.indices(client))[:samples]
        for client in range(parts.num_clients)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in kept])])
    return replace(parts, samples=np.concatenate(kept), offsets=offsets)
