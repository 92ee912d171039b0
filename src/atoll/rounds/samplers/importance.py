"""Importance sampling. Shapes: N registered clients, K of them known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.core.options import Range
from atoll.rounds.drawing import unbiased

Explore = Annotated[float, Range(0, 1, open_low=True, hint="at 0 some clients might never be asked again")]


def importance(by: Literal["loss", "norm"] = "norm", explore: Explore = 0.1) -> Sampler:
    """Draw clients by their last known loss or update norm, and make up for it in their shares.

    p_k = explore / N + (1 - explore) * score_k / sum of scores, drawn with replacement. As in the optimal scheme of
    Chen et al. (2020, arXiv:2010.13723), p_k grows with the norm and the update is weighed by 1 / p_k. Unlike there,
    norms are those of a client's last round, so that nobody trains in vain; p_k leaves the client's weight out; draws
    have a fixed number instead of independent coins; a part is uniform, since an old norm may be wrong.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        score_N = _scores(population.scores, population.num_clients)
        return unbiased(rng, num, population, explore + (1 - explore) * score_N)

    return Sampler(sample, scheme="by score with replacement", score=by)


def _scores(scores: Mapping[int, float], num_clients: int) -> np.ndarray:
    """Scores over their mean; clients never seen, or with a score that is no finite number, have the mean."""
    score_N = np.ones(num_clients)
    client_K = np.fromiter(scores.keys(), np.int64, len(scores))
    score_K = np.fromiter(scores.values(), np.float64, len(scores))
    known_K = np.isfinite(score_K)
    score_K = score_K[known_K].clip(min=0)
    if score_K.any():
        score_N[client_K[known_K]] = score_K / score_K.mean()
    return score_N
