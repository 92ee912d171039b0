"""A lower bound on what a Gaussian mechanism gives away, from canaries that are seen or missed.

A canary moves what is released by a known length if it is in. Who guesses "in" beyond half of that length errs in two
ways: canaries are missed, and entries without one are taken for one. Under mu-Gaussian privacy (Dong, Roth and Su 2019,
arXiv:1905.02383) the rates a and b of both obey b >= Phi(Phi^-1(1 - a) - mu), so that bounds on them give one on mu
(Nasr et al. 2023, arXiv:2302.07956). This takes far fewer canaries than a bound on epsilon alone, and one mu tells all
epsilons of a Gaussian mechanism.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

LEAST, MOST = 1 << 10, 1 << 18
"""Canaries that are looked for by default, at least and at most."""
CHANCE = 0.95
"""With what probability an audit finds what it says that it can find."""


class Counts(NamedTuple):
    """How often canaries were missed, and how often one was seen where none is."""

    inside: int = 0
    missed: int = 0
    outside: int = 0
    mistaken: int = 0

    def __add__(self, other: object) -> Counts:
        """Both together."""
        assert isinstance(other, Counts)
        return Counts(*(left + right for left, right in zip(self, other, strict=True)))


def most_likely(num_hits: int, num: int, confidence: float) -> float:
    """The largest probability with which so few hits of so many are not ruled out (Clopper and Pearson 1934).

    >>> round(most_likely(0, 100, 0.95), 4)
    0.0295
    """
    from scipy.stats import beta

    return 1.0 if num_hits >= num else float(beta.ppf(confidence, num_hits + 1, num - num_hits))


def least_mu(counts: Counts, confidence: float) -> float:
    """The mu that a mechanism must have at least, at this confidence, to be seen so well; 0 if nothing is shown."""
    from scipy.stats import norm

    each = (1 + confidence) / 2
    missed = most_likely(counts.missed, counts.inside, each)
    mistaken = most_likely(counts.mistaken, counts.outside, each)
    return max(0.0, -float(norm.ppf(missed)) - float(norm.ppf(mistaken)))


def reached_mu(mu: float, num_inside: int, num_outside: int, confidence: float) -> float:
    """The bound that is found with a probability of CHANCE if mu is the truth."""
    from scipy.stats import binom, norm

    rate, each = float(norm.cdf(-mu / 2)), (1 + CHANCE) / 2
    missed, mistaken = (int(binom.ppf(each, num, rate)) for num in (num_inside, num_outside))
    return least_mu(Counts(num_inside, missed, num_outside, mistaken), confidence)


def detectable(claimed: float, num_inside: int, num_outside: int, confidence: float, seen: float = 1.0) -> float:
    """The largest share of the claimed noise that would be found out, with a probability of CHANCE; 0 if none would.

    `seen` is how much of its length a canary shows.
    """
    shares = [step / 100 for step in range(99, 0, -1)]
    return next(
        (s for s in shares if reached_mu(seen * claimed / s, num_inside, num_outside, confidence) > claimed), 0.0
    )


def canaries_for(claimed: float, share: float, outside: float, confidence: float, seen: float = 1.0) -> int:
    """How many canaries find out noise of this share of the claimed, with `outside` entries for each.

    If MOST do not find it out, a few are enough to say so.
    """
    num = LEAST
    while not reached_mu(seen * claimed / share, num, int(num * outside), confidence) > claimed:
        if num >= MOST:
            return 4 * LEAST
        num *= 2
    return num


def count_seen(score_D: Tensor, entries_M: np.ndarray, seen: float = 1.0) -> Counts:
    """Guess, by scores in clips, which entries have a canary, and compare with those that do."""
    guessed_D = (score_D > seen / 2).numpy()
    inside_D = np.zeros(len(guessed_D), dtype=bool)
    inside_D[entries_M] = True
    return Counts(
        inside=int(inside_D.sum()),
        missed=int((inside_D & ~guessed_D).sum()),
        outside=int((~inside_D).sum()),
        mistaken=int((~inside_D & guessed_D).sum()),
    )
