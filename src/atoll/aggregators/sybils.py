"""Count clients that send nearly the same once, before another rule. Shapes: C clients, M voices, D parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import mixed
from atoll.aggregators.geometry import squared_distances
from atoll.core.aggregator import Aggregator, prepared
from atoll.core.errors import PlanError
from atoll.core.options import Seed, ShareBelowOne
from atoll.core.parts import Part

EXAMPLES = [{"rule": "geometric_median"}, {"rule": {"name": "centered_clipping", "tau": 0.5}}]


def sybils(rule: Part, reach: ShareBelowOne = 0.3, seed: Seed = 0) -> Aggregator:
    """Put updates that lie closer together than honest ones do into one, their mean, then apply `rule`.

        i and j are one voice if |x_i - x_j| <= reach q,   q the lower quartile of the distances of all pairs

    and so are those linked by others. Honest clients draw other samples, so that they differ; colluders who all send
    the vector that does most harm, or copy one client, do not, and count once. (Fung et al. 2020, arXiv:1808.04866,
    tell sybils by this, with weights by cosine similarity.) If most clients are honest, more than a quarter of the
    pairs are, so that q is at most their largest distance, and fewer than a quarter are pairs of bad ones. Those who
    take care to differ by more than reach q are as many as before: `rule` must stand them. Any n will do, and so it
    must for `rule`, since voices may be few; the breakdown point is that of `rule`. Weights are ignored, also by it.
    """
    inner: Aggregator = rule.build("aggregators", seed=seed)
    if inner.min_updates > 1 or not inner.needs_individuals:  # what weighs clients cannot weigh voices
        why = inner.needs if inner.min_updates > 1 else f"{rule.name} does not see one from another"
        raise PlanError(f"sybils may leave a single voice, but {why}: use norm_clipping or geometric_median after it")

    def voices(updates_CD: Tensor, number: int) -> Tensor:
        return mixed(_shares(squared_distances(updates_CD).sqrt(), reach), updates_CD)

    return prepared(voices, inner, min_updates=1, needs=inner.needs)


def _shares(distance_CC: Tensor, reach: float) -> Tensor:
    """The share of each client in each voice, (M, C); voices are in the order of their first clients."""
    num = len(distance_CC)
    pairs = distance_CC[*torch.triu_indices(num, num, 1)].sort().values
    linked_CC = distance_CC <= (reach * float(pairs[len(pairs) // 4]) if num > 1 else 0.0)
    number_C = voice_C = torch.arange(num)
    for _ in range(num):
        voice_C = torch.where(linked_CC, voice_C, num).amin(1)  # the first client that each can reach
    member_MC = (voice_C == number_C[voice_C == number_C, None]).double()
    share_MC: Tensor = member_MC / member_MC.sum(1, keepdim=True)
    return share_MC
