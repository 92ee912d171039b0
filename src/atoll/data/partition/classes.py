"""A fixed number of classes for each client.

Shapes: C clients, P classes that have samples, N training samples, H holders of one class.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Clients, Partition, class_labels, dealt, generator

PURPOSE = 107
MAX_SWEEPS = 100
"""Maximum number of passes over all classes that make the clients' sizes equal."""

EXAMPLE = {"classes_per_client": 5}


def classes(
    dataset: Dataset,
    *,
    num_clients: Clients = 10,
    seed: Seed = 0,
    classes_per_client: Count = 2,
    in_order: bool = False,
) -> Partition:
    """Give every client samples of exactly `classes_per_client` classes (Li et al. 2022, arXiv:2102.02079, "#C = k").

    The numbers of clients that hold a class differ by at most one. Each class is split among its holders so that the
    sizes of clients become as equal as possible, where the paper splits it evenly. Classes are random, or consecutive
    with `in_order`, so that with two each a client holds 0 and 1, or 2 and 3, and so on, as in PFLlib's benchmark
    (arXiv:2312.04992).
    """
    labels_N = class_labels("classes", dataset)
    present_P, counts_P = np.unique(labels_N, return_counts=True)
    num_present = len(present_P)
    if not classes_per_client <= num_present <= num_clients * classes_per_client:
        raise PlanError(
            f"classes cannot deal the {num_present} classes of {dataset.name} to {num_clients} clients with exactly "
            f"{classes_per_client} each; set classes_per_client to at least {-(-num_present // num_clients)} and at "
            f"most {num_present}"
        )
    rng = generator(seed, PURPOSE)
    holds_CP = _assign_classes(num_clients, num_present, classes_per_client, None if in_order else rng)
    short_P = np.flatnonzero(counts_P < holds_CP.sum(axis=0))
    if len(short_P):
        label, count = present_P[short_P[0]], counts_P[short_P[0]]
        raise PlanError(
            f"classes cannot split the {count} samples of class {label} of {dataset.name} among "
            f"{holds_CP[:, short_P[0]].sum()} clients; lower num_clients or classes_per_client"
        )
    counts_CP = _equal_sizes(holds_CP, counts_P)
    shuffled_N = rng.permutation(dataset.num_train)
    by_class_N = shuffled_N[np.argsort(labels_N[shuffled_N], kind="stable")]
    owner_N = np.concatenate([np.repeat(np.arange(num_clients), counts_C) for counts_C in counts_CP.T])
    by_owner_N = by_class_N[np.argsort(owner_N, kind="stable")]
    return dealt(by_owner_N, np.concatenate([[0], np.cumsum(counts_CP.sum(axis=1))]))


def _assign_classes(
    num_clients: int, num_present: int, classes_per_client: int, rng: np.random.Generator | None
) -> Array:
    """Return the classes of each client, (C, P) of 0 and 1: each in turn gets those with the fewest holders so far.

    Among classes with as many holders chance decides, or their order without a generator.
    """
    holds_CP = np.zeros((num_clients, num_present), dtype=np.int64)
    holders_P = np.zeros(num_present)
    for client in range(num_clients):
        tie_P = 0.0 if rng is None else rng.random(num_present)
        chosen = np.argsort(holders_P + tie_P, kind="stable")[:classes_per_client]
        holds_CP[client, chosen] = 1
        holders_P[chosen] += 1
    return holds_CP


def _equal_sizes(holds_CP: Array, counts_P: Array) -> Array:
    """Return the samples of each class per client, (C, P): split evenly, then moved class by class to equal sizes."""
    num_holders_P = holds_CP.sum(axis=0)
    counts_CP = holds_CP * (counts_P // num_holders_P)
    for _ in range(MAX_SWEEPS):
        before_CP = counts_CP.copy()
        for label, count in enumerate(counts_P):
            holders_H = np.flatnonzero(holds_CP[:, label])
            others_H = counts_CP[holders_H].sum(axis=1) - counts_CP[holders_H, label]
            counts_CP[holders_H, label] = _fill_evenly(others_H, int(count))
        if (counts_CP == before_CP).all():
            break
    return np.asarray(counts_CP)


def _fill_evenly(others_H: Array, amount: int) -> Array:
    """Distribute an amount over holders, at least one each, so that others_H plus the result is as even as possible."""

    def needed(level: int) -> int:
        return int(np.maximum(level - others_H, 1).sum())

    levels = range(int(others_H.min()), int(others_H.max()) + amount + 1)
    level = levels[bisect_right(levels, amount, key=needed) - 1]
    counts_H = np.maximum(level - others_H, 1)
    counts_H[np.flatnonzero(others_H < level)[: amount - counts_H.sum()]] += 1
    return np.asarray(counts_H)
