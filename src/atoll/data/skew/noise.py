"""Feature skew: noise that grows from client to client. Shapes: C clients, S samples."""

from __future__ import annotations

import numpy as np

from atoll.core.options import Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, generator
from atoll.data.shares import Amount
from atoll.data.skew.features import with_features

PURPOSE = 113


def noise(dataset: Dataset, partition: Partition, *, seed: Seed = 0, sigma: Amount = 0.1) -> Partition:
    """Add Gaussian noise whose standard deviation grows from client to client: sigma i / C for client i of 1..C.

    This is Gau(sigma i / N) of Li et al. 2022 (arXiv:2102.02079, noise-based feature imbalance), which their code uses
    as the standard deviation. Noise is in the units of a model's input; images are usually in [0, 1].
    """

    def add_noise(client: int, x_S: Array) -> Array:
        deviation = sigma * (client + 1) / partition.num_clients / abs(dataset.scale)
        return x_S + deviation * generator(seed, PURPOSE, client).standard_normal(x_S.shape, dtype=np.float32)

    return with_features("noise", dataset, partition, add_noise)
