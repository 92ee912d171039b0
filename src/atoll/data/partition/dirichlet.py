"""Dirichlet label skew. Shapes: C clients, K classes, N training samples, S samples of one client."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed, above, at_least
from atoll.data.dataset import Dataset
from atoll.data.index import (
    Array,
    Clients,
    Partition,
    class_labels,
    dealt,
    drawable,
    drawn,
    generator,
)

PURPOSE = 103
MAX_DRAWS = 1000
"""Maximum number of draws until every client has `min_samples`."""


def dirichlet(
    dataset: Dataset,
    *,
    num_clients: Clients = 10,
    seed: Seed = 0,
    alpha: Annotated[float, above(0, "0.1 is very skewed, 100 nearly IID")] = 0.5,
    min_samples: Annotated[int, at_least(0, "0 allows empty clients")] = 1,
    samples_per_client: Count | None = None,
) -> Partition:
    """Skew labels by Dir(alpha): near 0 a client has one class, at 100 nearly IID (Hsu et al. 2019, arXiv:1909.06335).

    By default each class is split over the clients in proportions p_k ~ Dir_C(alpha) (Yurochkin et al. 2019,
    arXiv:1905.12022, sec. 4), redrawn until every client has `min_samples`. With `samples_per_client` each client draws
    its own mixture q ~ Dir_K(alpha K prior) and samples from the classes, renormalising q when one is exhausted (Hsu,
    sec. 3), so that there may be any number of clients. Either way a client's mixture is about Dir_K(alpha); Hsu's
    alpha is K times this one.
    """
    labels_N = class_labels("dirichlet", dataset)
    rng = generator(seed, PURPOSE)
    shuffled_N = rng.permutation(dataset.num_train)
    pools_N = shuffled_N[np.argsort(labels_N[shuffled_N], kind="stable")]
    counts_K = np.bincount(labels_N, minlength=dataset.num_classes)
    if samples_per_client is not None:
        drawable(dataset, samples_per_client)
        draw = partial(_draw, pools_N.astype(np.int32), counts_K, float(alpha), samples_per_client, int(seed))
        return drawn(num_clients, samples_per_client, draw)
    if min_samples * num_clients > dataset.num_train:
        raise PlanError(
            f"dirichlet cannot give {num_clients} clients {min_samples} samples each: {dataset.name} has "
            f"{dataset.num_train}; ask for fewer clients, lower min_samples (0 allows empty clients), or set "
            "samples_per_client so that clients may overlap"
        )
    counts_KC = _split(counts_K, num_clients, alpha, min_samples, rng)
    owner_N = np.concatenate([np.repeat(np.arange(num_clients), counts_C) for counts_C in counts_KC])
    by_owner_N = pools_N[np.argsort(owner_N, kind="stable")]
    return dealt(by_owner_N, np.concatenate([[0], np.cumsum(counts_KC.sum(axis=0))]))


def _split(counts_K: Array, num_clients: int, alpha: float, min_samples: int, rng: np.random.Generator) -> Array:
    """Draw the number of samples of each class for each client, (K, C)."""
    best = 0
    for _ in range(MAX_DRAWS):
        ends_KC = np.cumsum(rng.dirichlet(np.full(num_clients, alpha), size=len(counts_K)), axis=1)
        ends_KC = np.floor(ends_KC * counts_K[:, None] + 0.5).astype(np.int64)
        ends_KC[:, -1] = counts_K
        counts_KC = np.diff(ends_KC, axis=1, prepend=0)
        smallest = int(counts_KC.sum(axis=0).min())
        if smallest >= min_samples:
            return counts_KC
        best = max(best, smallest)
    raise PlanError(
        f"dirichlet could not give each of {num_clients} clients {min_samples} samples with alpha = {alpha} in "
        f"{MAX_DRAWS} draws (the best draw left one client with {best}); raise alpha, ask for fewer clients, lower "
        "min_samples (0 allows empty clients), or set samples_per_client so that clients may overlap"
    )


def _draw(pools_N: Array, counts_K: Array, alpha: float, samples_per_client: int, seed: int, client: int) -> Array:
    rng = generator(seed, PURPOSE, client)
    prior_K = counts_K / counts_K.sum()
    present = np.flatnonzero(counts_K)
    mixture_K = np.zeros(len(counts_K))
    mixture_K[present] = rng.dirichlet(alpha * len(present) * prior_K[present])
    taken_K = np.zeros_like(counts_K)
    while (missing := samples_per_client - taken_K.sum()) > 0:
        free_K = taken_K < counts_K
        weights_K = np.where(free_K, mixture_K, 0.0)
        if weights_K.sum() <= 0.0:
            weights_K = np.where(free_K, prior_K, 0.0)
        taken_K = np.minimum(taken_K + rng.multinomial(missing, weights_K / weights_K.sum()), counts_K)
    starts_K = np.cumsum(counts_K) - counts_K
    parts = [pools_N[starts_K[k] + rng.choice(counts_K[k], taken_K[k], replace=False)] for k in np.flatnonzero(taken_K)]
    return np.concatenate(parts).astype(np.int64)
