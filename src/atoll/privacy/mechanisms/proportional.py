"""Private steps whose clip is proportional to each client's own gradient; their guarantee has a gap."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from atoll.core.privacy import Exposure, Mechanism, SampleSteps
from atoll.privacy.accounting import quick_bounds
from atoll.privacy.grid import check_noise
from atoll.privacy.mechanisms.sample import ASSUMPTIONS, sampled_gaussian

NEIGHBOURS = (
    "one sample of one client, or an empty one in its place that counts for nothing (zero-out), as long as the lengths "
    "of its mean gradients stay what they are"
)
OPEN = (
    "NOT PROTECTED: the length of each client's mean gradient at each step. It sets the noise, so that it can be read "
    "off what is released, and one sample can change it; epsilon is that of the rest, for those who know the lengths"
)


EXAMPLE = {"noise": 1.0, "epsilon": 8.0, "delta": 1e-5, "test_noise": True}


def proportional(noise: float, epsilon: float, delta: float, exposure: Exposure, test_noise: bool = False) -> Mechanism:
    """Take private steps with a clip of C_i = lambda |g_i|, where g_i is the mean gradient of client i's batch.

    The noise on the sum of a batch has standard deviation `noise` times |g_i|, so that all clients' gradients have the
    same relative noise. As a multiple of the clip it is sigma = noise / lambda for every client, and lambda is solved
    for the budget: `noise` divided by the least sigma that spends `epsilon` on all rounds of the plan.

    This is NOT a differentially private release. The Gaussian mechanism covers a clip that does not depend on the data;
    |g_i| does. The guarantee is weaker: two data sets whose |g_i| agree in every step cannot be distinguished beyond
    (epsilon, delta). Clips for each client and round are in use (Fu et al. 2022, arXiv:2211.15893); they are private
    only if they depend on public or earlier released values alone, as the fixed clip of `sample` does.
    """
    check_noise("proportional", delta, epsilon, noise=noise)
    sigma = min_sigma(exposure, epsilon, delta)
    return Mechanism(
        unit="sample",
        neighbours=NEIGHBOURS,
        delta=delta,
        epsilon=epsilon,
        event=lambda exposure: sampled_gaussian(exposure, sigma),
        steps=SampleSteps(clip=0.0, sigma=sigma, share=noise / sigma),
        assumptions=(OPEN, *ASSUMPTIONS),
        test_noise=test_noise,
    )


@lru_cache(maxsize=16)
def min_sigma(exposure: Exposure, epsilon: float, delta: float) -> float:
    """Return the least noise multiplier with which an exposure spends at most epsilon, by Renyi divergences."""
    import dp_accounting  # here, because the import takes a second
    from dp_accounting.rdp import RdpAccountant

    groups = exposure.per_group()

    def largest_event(sigma: float) -> Any:
        """Return the event of the client with the largest privacy loss."""
        return sampled_gaussian(groups[int(quick_bounds(sigma, groups, delta).argmax())], sigma)

    sigma: float = dp_accounting.calibrate_dp_mechanism(
        RdpAccountant,
        largest_event,
        epsilon,
        delta,
        dp_accounting.LowerEndpointAndGuess(0.01, 1.0),
    )
    return sigma
