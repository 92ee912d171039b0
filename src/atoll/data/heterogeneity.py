"""Measures of label skew between clients. Shapes: C clients, K classes, N training samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.data.index import Array, Partition


def label_counts(
    partition: Partition, labels: Array, num_classes: int, clients: Sequence[int] | np.ndarray[Any, np.dtype[Any]]
) -> Array:
    """Count the labels of the given clients, (C, K) int64; every position of a sequence counts as one label."""
    counts_CK = np.zeros((len(clients), num_classes), dtype=np.int64)
    for row, client in enumerate(clients):
        counts_CK[row] = np.bincount(labels[partition.indices(int(client))].ravel(), minlength=num_classes)
    return counts_CK


def js_divergence(counts_CK: Array) -> Array:
    """Return the Jensen-Shannon divergence of each client's labels from those of all, (C,), in [0, 1] (base 2).

    JS(p_k, p) = (KL(p_k || m) + KL(p || m)) / 2 with m = (p_k + p) / 2 (Lin 1991, IEEE Trans. Inf. Theory 37).
    """
    own_CK, all_K = _shares(counts_CK)
    middle_CK = (own_CK + all_K) / 2
    return (_kl(own_CK, middle_CK) + _kl(np.broadcast_to(all_K, own_CK.shape), middle_CK)) / 2


def earth_movers_distance(counts_CK: Array) -> Array:
    """Return the sum over classes of |p_k - p|, each client's labels against those of all, (C,), in [0, 2].

    Zhao et al. 2018 (arXiv:1806.00582, sec. 3) call it the earth mover's distance; all classes are equally far from
    each other, so that it is the L1 distance.
    """
    own_CK, all_K = _shares(counts_CK)
    return np.asarray(np.abs(own_CK - all_K).sum(axis=1))


def weighted_mean(values_C: Array, counts_CK: Array) -> float:
    """Return the mean of one number per client, weighted by its number of samples."""
    return float(np.average(values_C, weights=counts_CK.sum(axis=1)))


def _shares(counts_CK: Array) -> tuple[Array, Array]:
    """Return the label distributions of each client, (C, K), and of all, (K,); an empty client gets that of all."""
    sizes_C1 = counts_CK.sum(axis=1, keepdims=True)
    all_K = counts_CK.sum(axis=0) / counts_CK.sum()
    return np.where(sizes_C1 > 0, counts_CK / np.maximum(sizes_C1, 1), all_K), all_K


def _kl(p_CK: Array, q_CK: Array) -> Array:
    """Return the Kullback-Leibler divergence in bits, (C,); q must be above 0 wherever p is."""
    ratio_CK = np.divide(p_CK, q_CK, out=np.ones_like(q_CK), where=p_CK > 0)
    return np.asarray((p_CK * np.log2(ratio_CK)).sum(axis=1))
