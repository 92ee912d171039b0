"""Importance sampling. Shapes: N registered clients, K of them with a score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from atoll.core.options import Range
from atoll.core.sampler import Pick, Population, Sampler
from atoll.rounds.drawing import draw_unbiased

Explore = Annotated[float, Range(0, 1, open_low=True, hint="at 0 some clients might never be asked again")]


def importance(by: Literal["loss", "norm"] = "norm", explore: Explore = 0.1) -> Sampler:
    """Draw clients by their last loss or update norm, with shares that keep the mean unbiased.

    p_k = explore / N + (1 - explore) * score_k / sum of scores, drawn with replacement. As in the optimal scheme of
    Chen et al. (2020, arXiv:2010.13723), p_k grows with the norm and the update is weighed by 1 / p_k. Unlike there,
    norms are those of a client's last round, so that only drawn clients train; p_k does not include the client's
    weight; the number of draws is fixed; and a part is uniform, because an old norm may be wrong.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        score_N = _relative_scores(population.scores, population.num_clients)
        return draw_unbiased(rng, num, population, explore + (1 - explore) * score_N)

    return Sampler(sample=sample, scheme="by score with replacement", score=by)


def _relative_scores(scores: Mapping[int, float], num_clients: int) -> np.ndarray:
    """Return scores divided by their mean, (N,); 1 for clients without a finite score."""
    score_N = np.ones(num_clients)
    client_K = np.fromiter(scores.keys(), np.int64, len(scores))
    score_K = np.fromiter(scores.values(), np.float64, len(scores))
    finite_K = np.isfinite(score_K)
    score_K = score_K[finite_K].clip(min=0)
    if score_K.any():
        score_N[client_K[finite_K]] = score_K / score_K.mean()
    return score_N
