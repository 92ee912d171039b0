"""Statistical lower bounds on the privacy loss of a Gaussian mechanism, from canaries that are detected or missed.

A canary that takes part moves the released value by a known length. The test that guesses "present" beyond half of that
length makes two kinds of errors: it misses canaries, and it reports canaries where there are none. Under mu-Gaussian
privacy (Dong, Roth and Su 2019, arXiv:1905.02383) the rates a and b of these errors satisfy
b >= Phi(Phi^-1(1 - a) - mu), so that upper bounds on both give a lower bound on mu (Nasr et al. 2023,
arXiv:2302.07956). This takes far fewer canaries than a bound on epsilon alone, and mu determines epsilon for every
delta.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

LEAST, MOST = 1 << 10, 1 << 18
"""Minimum and maximum of the default number of canaries."""
CHANCE = 0.95
"""Probability with which an audit detects what it states as detectable_share."""


class Counts(NamedTuple):
    """Numbers of entries with and without a canary, and of the errors in each."""

    inside: int = 0
    """Entries with a canary."""
    missed: int = 0
    """Entries with a canary that was not detected."""
    outside: int = 0
    """Entries without a canary."""
    mistaken: int = 0
    """Entries without a canary where one was reported."""
    total: float = 0.0
    """Sum of the scores of entries with a canary."""
    square: float = 0.0
    """Sum of the squared scores of entries without one: noise, and nothing else."""

    @property
    def mean_length(self) -> float:
        """Return by how many clips a canary moves what is released, on average."""
        return self.total / max(1, self.inside)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the noise in clips, where no client sends anything."""
        return math.sqrt(self.square / max(1, self.outside))

    def __add__(self, other: object) -> Counts:
        """Return the sums of all counts."""
        assert isinstance(other, Counts)
        sums: list[Any] = [left + right for left, right in zip(self, other, strict=True)]
        return Counts(*sums)


def rate_upper_bound(num_hits: int, num: int, confidence: float) -> float:
    """Return the Clopper-Pearson upper bound on the probability of a hit, given `num_hits` of `num` (1934).

    >>> round(rate_upper_bound(0, 100, 0.95), 4)
    0.0295
    """
    from scipy.stats import beta

    return 1.0 if num_hits >= num else float(beta.ppf(confidence, num_hits + 1, num - num_hits))


def mu_lower_bound(counts: Counts, confidence: float) -> float:
    """Return a lower bound on mu at this confidence, from the errors of the test; 0 if they show nothing."""
    from scipy.stats import norm

    one_sided = (1 + confidence) / 2
    missed = rate_upper_bound(counts.missed, counts.inside, one_sided)
    mistaken = rate_upper_bound(counts.mistaken, counts.outside, one_sided)
    return max(0.0, -float(norm.ppf(missed)) - float(norm.ppf(mistaken)))


def reachable_mu(mu: float, num_inside: int, num_outside: int, confidence: float) -> float:
    """Return the lower bound that an audit reaches with probability CHANCE if `mu` is the true value."""
    from scipy.stats import binom, norm

    rate, one_sided = float(norm.cdf(-mu / 2)), (1 + CHANCE) / 2
    missed, mistaken = (int(binom.ppf(one_sided, num, rate)) for num in (num_inside, num_outside))
    return mu_lower_bound(Counts(num_inside, missed, num_outside, mistaken), confidence)


def detectable_share(claimed: float, num_inside: int, num_outside: int, confidence: float, seen: float = 1.0) -> float:
    """Return the largest share of the claimed noise that an audit detects as too small, with probability CHANCE.

    `claimed` is the claimed mu, and `seen` the share of its length by which a canary moves the released value. 0 means
    that not even noise of 1 % of the claimed size would be detected.
    """
    shares = [step / 100 for step in range(99, 0, -1)]
    return next(
        (s for s in shares if reachable_mu(seen * claimed / s, num_inside, num_outside, confidence) > claimed), 0.0
    )


def num_canaries_for(claimed: float, share: float, outside: float, confidence: float, seen: float = 1.0) -> int:
    """Return the number of canaries that detect noise of `share` of the claimed size, with `outside` entries for each.

    If MOST canaries are too few, return 4 * LEAST: enough to report that nothing can be detected.
    """
    num = LEAST
    while not reachable_mu(seen * claimed / share, num, int(num * outside), confidence) > claimed:
        if num >= MOST:
            return 4 * LEAST
        num *= 2
    return num


def count_detections(score_D: Tensor, entries_M: np.ndarray, seen: float = 1.0) -> Counts:
    """Guess from scores, in units of the clip, which entries have a canary, and count the errors.

    `entries_M` are the entries that have one.
    """
    guessed_D = (score_D > seen / 2).numpy()
    inside_D = np.zeros(len(guessed_D), dtype=bool)
    inside_D[entries_M] = True
    return Counts(
        inside=int(inside_D.sum()),
        missed=int((inside_D & ~guessed_D).sum()),
        outside=int((~inside_D).sum()),
        mistaken=int((~inside_D & guessed_D).sum()),
        total=float(score_D.numpy()[inside_D].sum(dtype=np.float64)),
        square=float(np.square(score_D.numpy()[~inside_D], dtype=np.float64).sum()),
    )
