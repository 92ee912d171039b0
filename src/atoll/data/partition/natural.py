"""One client for each natural owner. Shapes: N training samples, C clients, O owners."""

from __future__ import annotations

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition, dealt, generator

PURPOSE = 104
WITH_OWNERS = ("adult", "german_credit", "heart", "lung", "movielens", "shakespeare", "synthetic")


def natural(
    dataset: Dataset, *, num_clients: Clients | None = None, seed: Seed = 0, min_samples: Count = 1
) -> Partition:
    """Make each owner (hospital, speaker, device) a client with its own samples (Caldas et al. 2018, arXiv:1812.01097).

    Owners with fewer than `min_samples` are left out; `num_clients` chooses that many of the others by the seed.
    """
    rng = generator(seed, PURPOSE)
    if dataset.owners is None:
        raise PlanError(
            f"natural needs the owner of each sample, and {dataset.name} has none; "
            f"use partition = 'iid' or 'dirichlet', or data that has owners: {', '.join(WITH_OWNERS)}"
        )
    owners_O, sizes_O = np.unique(dataset.owners, return_counts=True)
    owners_C = owners_O[sizes_O >= min_samples]
    num_wanted = num_clients or 1
    if len(owners_C) < num_wanted:
        raise PlanError(
            f"natural needs at least {num_wanted} owners with {min_samples} samples or more, and {dataset.name} has "
            f"{len(owners_C)}; lower num_clients or min_samples"
        )
    if num_clients is not None:
        owners_C = np.sort(rng.choice(owners_C, num_clients, replace=False))
    by_owner_N = np.argsort(dataset.owners, kind="stable")
    samples = by_owner_N[np.isin(dataset.owners[by_owner_N], owners_C)]
    sizes_C = sizes_O[np.isin(owners_O, owners_C)]
    return dealt(samples, np.concatenate([[0], np.cumsum(sizes_C)]))
