"""Sample-level privacy: DP-SGD."""

from __future__ import annotations

from typing import Any

from atoll.core.privacy import Exposure, Mechanism, SampleSteps
from atoll.privacy.grid import check_noise

NEIGHBOURS = (
    "one sample of one client, or an empty one in its place that counts for nothing (zero-out): how many samples each "
    "client holds is the same, and no secret"
)
ASSUMPTIONS = (
    "how many samples each client holds is no secret: it sets the chance of a sample, the number of steps and the "
    "client's weight",
    "no sample is held by two clients: what a sample costs is counted within its client",
    "a client may be in every attempt: nothing is gained from drawing clients at random",
)


EXAMPLE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}


def sample(
    clip: float, sigma: float, delta: float, epsilon: float | None = None, test_noise: bool = False
) -> Mechanism:
    """Hide each sample by private local steps (DP-SGD: Abadi et al. 2016, arXiv:1607.00133, algorithm 1).

    A step draws each sample with probability B/n, clips each gradient to norm `clip`, adds them up, adds noise of
    standard deviation `sigma` times `clip`, and divides by B. Everything that leaves the client is computed from such
    sums, so that samples are protected from the server too. `test_noise` derives the noise from the plan's seed, which
    removes all protection.
    """
    check_noise("sample", delta, epsilon, clip=clip, sigma=sigma)
    return Mechanism(
        unit="sample",
        neighbours=NEIGHBOURS,
        delta=delta,
        epsilon=epsilon,
        event=lambda exposure: sampled_gaussian(exposure, sigma),
        steps=SampleSteps(clip, sigma),
        assumptions=ASSUMPTIONS,
        test_noise=test_noise,
    )


def sampled_gaussian(exposure: Exposure, sigma: float) -> Any:
    """Return the event of all private steps that one client may have taken."""
    import dp_accounting  # here, because the import takes a second

    step = dp_accounting.PoissonSampledDpEvent(exposure.sample_rate, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, exposure.attempts * exposure.steps)
