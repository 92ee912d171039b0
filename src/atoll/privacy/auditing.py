"""A lower bound on epsilon from guesses: how many of many coins an adversary can tell, and what that proves.

Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846): each of m canaries is in or out by a fair coin; the adversary sees
what is released, and guesses some of the coins. Under (epsilon, delta) the number of right guesses is hardly more than
that of so many coins that come up right with probability e^epsilon / (1 + e^epsilon).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Found(NamedTuple):
    """What an audit has shown."""

    epsilon: float
    """At least this much is given away, at the confidence that was asked for."""
    num_guesses: int
    num_right: int


def p_value(num_canaries: int, num_guesses: int, num_right: int, epsilon: float, delta: float) -> float:
    """The chance, at most, of so many right guesses if the mechanism were (epsilon, delta)-private (theorem 5.2).

    >>> p_value(100, 100, 50, 0.0, 0.0) > 0.5
    True
    """
    from scipy.stats import binom

    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(num_right - 1, num_guesses, chance))
    if delta == 0 or num_right == 0:
        return min(1.0, tail)
    fewer = np.cumsum(binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, chance))
    alpha = float((fewer / np.arange(1, num_right + 1)).max())
    return min(1.0, tail + 2 * num_canaries * delta * alpha)


def least_epsilon(num_canaries: int, num_guesses: int, num_right: int, delta: float, p: float) -> float:
    """The largest epsilon that so many right guesses rule out at this p-value; 0 if they rule out none."""
    if p_value(num_canaries, num_guesses, num_right, 0.0, delta) >= p:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(num_canaries, num_guesses, num_right, high, delta) < p and high < 64:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if p_value(num_canaries, num_guesses, num_right, middle, delta) < p else (low, middle)
        )
    return low


def audited(score_M: np.ndarray, inside_M: np.ndarray, delta: float, confidence: float = 0.95) -> Found:
    """The best lower bound from scores that are higher for canaries that are in.

    The highest scores are guessed to be in, with or without the lowest to be out, for several numbers of guesses; the
    p-value is shared out among all that are tried.
    """
    num = len(score_M)
    inside_M = inside_M[np.argsort(-score_M, kind="stable")]
    counts, p = _tried(num, confidence)
    found = []
    for count in counts:
        high, low = int(inside_M[:count].sum()), int((~inside_M[num - count :]).sum())
        found.append(Found(least_epsilon(num, count, high, delta, p), count, high))
        found.append(Found(least_epsilon(num, 2 * count, high + low, delta, p), 2 * count, high + low))
    return max(found)


def most_shown(num_canaries: int, num_seen: float, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that can be proved if so many of the canaries that are in are seen beyond doubt."""
    counts, p = _tried(num_canaries, confidence)
    return max(
        (least_epsilon(num_canaries, count, count, delta, p) for count in counts if count <= num_seen), default=0.0
    )


def _tried(num: int, confidence: float) -> tuple[list[int], float]:
    """How many of the highest scores are guessed, in turn, and the p-value of each of the two ways to guess."""
    counts = sorted({max(1, num >> power) for power in range(1, 9)})
    return counts, (1 - confidence) / (2 * len(counts))
