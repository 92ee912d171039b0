"""Client-level privacy without secret sampling: DP-FTRL."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update
from atoll.core.privacy import IN_TURN, Exposure, Mechanism, ReleaseContext, SendContext
from atoll.privacy.grid import CLIENT_DATA, LEVELS, bounded, check_noise, packed, unpacked
from atoll.privacy.noise import derived, discrete_gaussian

ASSUMPTIONS = (
    "the server is trusted: it sees each update, and what it publishes is protected",
    "clients are asked in turn, at most once in each tree; who is asked when need not be secret",
    "the ledger and the checkpoint stay secret",
    "the noise is an exact discrete Gaussian, to which the accountant's bound for the Gaussian applies",
    "how long a round takes is not protected",
)


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}


def ftrl(
    clip: float,
    sigma: float,
    delta: float,
    epsilon: float | None = None,
    per_layer: bool = False,
    test_noise: bool = False,
) -> Mechanism:
    """Add the noise of a binary tree to the running sum of updates (Kairouz et al. 2021, arXiv:2103.00039, alg. 1).

    The released running sum after t rounds of a pass carries one noise vector for each 1 in the binary digits of t; a
    round returns the change of that sum. Every pass over the clients has a new tree, so that each client is in a tree
    at most once and affects at most ceil(log2(t + 1)) of its nodes (appendix D.1).
    """
    check_noise("ftrl", delta, epsilon, clip=clip, sigma=sigma)

    def release(acc: State, memory: State, context: ReleaseContext) -> tuple[Aggregate, State]:
        exposure = context.exposure
        attempt = exposure.attempts - 1
        step = attempt % exposure.attempts_per_pass + 1
        sums_V = packed(acc)
        for number, sign in node_changes(step):
            key = derived(context.secret, "noise", attempt - step + number)
            noise_V = discrete_gaussian(key, sigma * LEVELS, len(sums_V))
            sums_V = sums_V + np.int64(sign) * noise_V
        scale = clip / LEVELS / (exposure.rate * exposure.num_clients)
        return unpacked(sums_V, acc, scale, context.dtype, exposure.cohort), memory

    def on_grid(update: Update, context: SendContext) -> Update:
        return bounded(update, clip, LEVELS, context.spec if per_layer else None)

    return Mechanism(
        unit="client",
        neighbours=CLIENT_DATA,
        delta=delta,
        epsilon=epsilon,
        event=partial(_trees, sigma),
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
        clip=clip,
        on_grid=on_grid,
        release=release,
        min_reports=lambda cohort: 0,
    )


def _trees(sigma: float, exposure: Exposure) -> Any:
    """Return the event of all attempts: one tree for each pass over the clients."""
    import dp_accounting as dp

    if exposure.scheme != IN_TURN:
        raise PlanError(
            f"ftrl requires each client at most once a pass, but here clients are drawn {exposure.scheme}: "
            'set sampler = "round_robin", or privacy = "central" with sampler = "poisson"'
        )
    passes, rest = divmod(exposure.attempts, exposure.attempts_per_pass)
    trees = []
    if passes:
        full_tree = dp.SingleEpochTreeAggregationDpEvent(sigma, exposure.attempts_per_pass)
        trees.append(dp.SelfComposedDpEvent(full_tree, passes))
    if rest:
        trees.append(dp.SingleEpochTreeAggregationDpEvent(sigma, rest))
    return dp.ComposedDpEvent(trees)


def node_changes(step: int) -> list[tuple[int, int]]:
    """Return the tree nodes whose noise enters (+1) and leaves (-1) the sum at a step, by the step that creates them.

    Step t creates the node over the last 2^k steps, k the number of trailing zeros of t in binary; it replaces the
    nodes created by the steps t - 2^0, t - 2^1, ..., t - 2^(k-1).

    >>> node_changes(8)
    [(8, 1), (7, -1), (6, -1), (4, -1)]
    """
    zeros = (step & -step).bit_length() - 1
    return [(step, 1), *((step - (1 << level), -1) for level in range(zeros))]
