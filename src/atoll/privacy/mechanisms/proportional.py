"""A clip that follows each client's own gradient, and what that leaves open."""

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
    """Private steps with a clip of C_i = lambda |g_i|, g_i being the mean gradient of client i's batch before the clip.

    The noise on the sum of a batch has deviation `noise` times |g_i|, so that every client's gradient is as noisy as
    any other's, however large. As a multiple of the clip that is sigma = noise / lambda, whatever the client, and
    lambda is solved for the budget: it is `noise` over the least sigma that spends `epsilon` on what the plan will run.

    This is NOT a differentially private release. The Gaussian mechanism covers a clip that does not depend on the data;
    |g_i| does. What holds is that two data sets whose |g_i| agree in every step cannot be told apart beyond (epsilon,
    delta). Clips for each client and round are in use (Fu et al. 2022, arXiv:2211.15893); they are private if they
    follow what was released before or is public, as the fixed clip of `sample` does.
    """
    check_noise("proportional", delta, epsilon, noise=noise)
    sigma = least_sigma(exposure, epsilon, delta)
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
def least_sigma(exposure: Exposure, epsilon: float, delta: float) -> float:
    """The least noise, in units of the clip, with which what will run spends at most epsilon, by Renyi divergences."""
    import dp_accounting  # it takes a second to import
    from dp_accounting.rdp import RdpAccountant

    groups = exposure.each_group()

    def event(sigma: float) -> Any:
        """What the client runs that spends most."""
        return sampled_gaussian(groups[int(quick_bounds(sigma, groups, delta).argmax())], sigma)

    found: float = dp_accounting.calibrate_dp_mechanism(
        RdpAccountant,
        event,
        epsilon,
        delta,
        dp_accounting.LowerEndpointAndGuess(0.01, 1.0),
    )
    return found
