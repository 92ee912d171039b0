"""Merge near-duplicate updates before another rule. Shapes: C clients, M clusters, D parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import weighted_sums
from atoll.aggregators.geometry import squared_distances
from atoll.core.aggregator import Aggregator, preprocessed
from atoll.core.errors import PlanError
from atoll.core.options import Seed, ShareBelowOne
from atoll.core.parts import Part

ROUNDING = 1e-13
"""Squared distances of float64 products err by about so much, as a share of the squares that they are made of."""
EXAMPLES = [{"rule": "geometric_median"}, {"rule": {"name": "centered_clipping", "tau": 0.5}}]


def sybils(rule: Part, reach: ShareBelowOne = 0.3, seed: Seed = 0) -> Aggregator:
    """Replace each cluster of updates that are closer together than honest ones by its mean, then apply `rule`.

        i and j are linked if |x_i - x_j| <= reach q,   q the lower quartile of the distances of all pairs

    and a cluster is all that is linked, directly or through others. Honest clients train on different samples, so that
    their updates differ; colluders that all send the same vector, or copy one client, form one cluster and count once.
    (Fung et al. 2020, arXiv:1808.04866, detect sybils by the same idea, with weights by cosine similarity.) If most
    clients are honest, more than a quarter of the pairs are honest, so that q is at most the largest honest distance,
    and fewer than a quarter are pairs of bad clients. Bad clients that differ by more than reach q are not merged:
    `rule` must withstand them. Any n is allowed, and `rule` must allow any n too, since there may be few clusters; the
    breakdown point is that of `rule`. Weights are ignored, also by `rule`.
    """
    inner: Aggregator = rule.build("aggregators", seed=seed)
    if inner.min_updates > 1 or not inner.needs_individuals:  # a rule that weighs clients cannot weigh clusters
        why = inner.needs if inner.min_updates > 1 else f"{rule.name} does not look at single updates"
        raise PlanError(f"sybils may leave a single cluster, but {why}: use norm_clipping or geometric_median after it")

    def cluster_means(updates_CD: Tensor, round_number: int) -> Tensor:
        square_C = torch.linalg.vector_norm(updates_CD, dim=1, dtype=torch.float64).square()
        distance_CC = squared_distances(updates_CD)
        distance_CC[distance_CC <= ROUNDING * (square_C[:, None] + square_C[None])] = 0.0  # equal, but for rounding
        return weighted_sums(_cluster_shares(distance_CC.sqrt(), reach), updates_CD)

    return preprocessed(cluster_means, inner, min_updates=1, needs=inner.needs)


def _cluster_shares(distance_CC: Tensor, reach: float) -> Tensor:
    """Return the share of each client in each cluster's mean, (M, C); clusters are sorted by their first clients."""
    num = len(distance_CC)
    pairs = distance_CC[*torch.triu_indices(num, num, 1)].sort().values
    linked_CC = distance_CC <= (reach * float(pairs[len(pairs) // 4]) if num > 1 else 0.0)
    client_C = cluster_C = torch.arange(num)
    for _ in range(num):
        cluster_C = torch.where(linked_CC, cluster_C, num).amin(1)  # the first client that each is linked to
    member_MC = (cluster_C == client_C[cluster_C == client_C, None]).double()
    share_MC: Tensor = member_MC / member_MC.sum(1, keepdim=True)
    return share_MC
