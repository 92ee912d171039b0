"""Quantity skew of a partition. Shapes: C clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.core.options import Positive, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Partition, disjoint, generator
from atoll.data.shares import Law, size_shares

PURPOSE = 111


def quantity(
    dataset: Dataset,
    partition: Partition,
    *,
    seed: Seed = 0,
    law: Law = "power",
    exponent: Positive | None = None,
    sigma: Positive | None = None,
    alpha: Positive | None = None,
) -> Partition:
    """Keep the fraction share_k / max share of client k's samples, drawn at random, and at least one of them.

    Its distribution of labels stays the same in expectation. The shares follow `law`: "power" (`exponent`, 1),
    "log_normal" (`sigma`, 1) or "dirichlet" (`alpha`, 0.5), see `shares.size_shares`. The other samples are not used.
    """
    parts = disjoint(partition)
    rng = generator(seed, PURPOSE)
    shares_C = size_shares(law, parts.num_clients, rng, exponent=exponent, sigma=sigma, alpha=alpha)
    sizes_C = parts.sizes()
    kept_C = np.rint(sizes_C * shares_C / shares_C.max()).astype(np.int64)
    kept_C = np.minimum(np.maximum(kept_C, 1), sizes_C)
    samples = np.concatenate([rng.permutation(parts.indices(client))[:kept] for client, kept in enumerate(kept_C)])
    return replace(parts, samples=samples, offsets=np.concatenate([[0], np.cumsum(kept_C)]))
