"""Quantity skew: IID clients of unequal size. Shapes: C clients, N training samples."""

from __future__ import annotations

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count, Positive, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition, dealt, generator
from atoll.data.shares import Law, size_shares

PURPOSE = 106


def quantity(
    dataset: Dataset,
    *,
    num_clients: Clients = 10,
    seed: Seed = 0,
    law: Law = "power",
    exponent: Positive | None = None,
    sigma: Positive | None = None,
    alpha: Positive | None = None,
    min_samples: Count = 1,
) -> Partition:
    """Split a random permutation into parts of unequal size: n_k = min_samples + share_k (N - C min_samples).

    The shares follow `law`: "power" (`exponent`, 1), "log_normal" (`sigma`, 1) or "dirichlet" (`alpha`, 0.5), see
    `shares.size_shares`. Every sample is assigned.
    """
    num_free = dataset.num_train - num_clients * min_samples
    if num_free < 0:
        raise PlanError(
            f"quantity cannot give {num_clients} clients {min_samples} samples each: {dataset.name} has "
            f"{dataset.num_train}; lower num_clients or min_samples"
        )
    rng = generator(seed, PURPOSE)
    shares_C = size_shares(law, num_clients, rng, exponent=exponent, sigma=sigma, alpha=alpha)
    ends_C = np.rint(np.cumsum(shares_C) * num_free).astype(np.int64) + min_samples * np.arange(1, num_clients + 1)
    return dealt(rng.permutation(dataset.num_train), np.concatenate([[0], ends_C]))
