"""Contracts of differential privacy: the mechanism that protects a client or a sample, and what an accountant needs.

A mechanism acts in up to four places: in the local loop (`steps`), on activations (`at_cut`) or an update (`at_client`)
before they leave their client, and on the server's sum (`on_grid`, `release`). Its `event` describes the privacy loss
of what has run, as data that an accountant composes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from atoll.core.messages import Aggregate, State, Update
from atoll.core.params import ParamSpec


class Draws(NamedTuple):
    """Sampling rate and number of steps of a client's task."""

    rate: float
    """Probability that a sample is in the batch of a step, in (0, 1]."""
    steps: int
    """Number of steps of one task."""
    client: int
    """Number of a client that has this rate and these steps."""


class Exposure(NamedTuple):
    """Numbers that describe what has run, or will run, to an accountant."""

    scheme: str
    """How a cohort is drawn, in the sampler's own term, such as `poisson`."""
    rate: float
    """Probability that a client is in the cohort of an attempt, in (0, 1]."""
    attempts: int
    """Number of attempts that released something or may have done so."""
    sample_rate: float
    """Probability that a sample is in the batch of a step, for the client that is accounted for."""
    steps: int
    """Number of steps of one task, for the same client."""
    num_clients: int = 0
    """Number of registered clients; it is public."""
    num_samples: int = 0
    """Number of training samples of all clients together; it is public."""
    groups: tuple[Draws, ...] = ()
    """Candidates for the client with the largest privacy loss; empty where all clients are alike."""

    def per_group(self) -> list[Exposure]:
        """Return one exposure for each group of clients, or this one where there are no groups."""
        return [self._replace(sample_rate=one.rate, steps=one.steps, groups=(one,)) for one in self.groups] or [self]

    @property
    def cohort(self) -> int:
        """Expected number of clients in an attempt, at least 1."""
        return max(1, round(self.rate * self.num_clients))

    @property
    def attempts_per_pass(self) -> int:
        """Number of consecutive attempts in which no client is asked twice, where clients are asked in turn."""
        return max(1, self.num_clients // self.cohort)

    @property
    def participations(self) -> int:
        """Maximum number of attempts with the same client: one in each pass if asked in turn, else all."""
        return -(-self.attempts // self.attempts_per_pass) if self.scheme == IN_TURN else self.attempts


RELATION = "zero-out"
"""Relation between neighbouring data sets: one client, or sample, is replaced by an empty one of no effect.

Both have the same number of clients or samples, so that this number may be published and may set rates, weights and
denominators (Kairouz et al. 2021, arXiv:2103.00039; dp-accounting calls it REPLACE_SPECIAL). Under Poisson sampling the
released value has the same two distributions as under add-or-remove, hence the same epsilon."""
IN_TURN = "in turn"
"""Scheme of samplers that ask every client once before they ask any client again."""


class SampleSteps(NamedTuple):
    """Settings of private local steps: clip each sample's gradient, and add noise to the sum over the batch."""

    clip: float
    """Maximum norm of one sample's gradient."""
    sigma: float
    """Noise multiplier: the standard deviation of the noise divided by `clip`."""
    share: float = 0.0
    """If above 0, each step clips at this multiple of the norm of the client's own gradient instead of at `clip`."""


class CutNoise(NamedTuple):
    """Settings of noise on the activations that a client of split learning sends."""

    clip: float
    """Maximum norm of one sample's activations."""
    sigma: float
    """Noise multiplier: the standard deviation of the noise on each value divided by `clip`."""


class SendContext(NamedTuple):
    """Context of stacked updates that a mechanism protects."""

    spec: ParamSpec
    clip: float
    """Maximum norm of an update."""
    cohort: int
    """Number of clients in the attempt."""
    key: Callable[[int], bytes]
    """Row -> the secret key of this client and attempt."""


class ReleaseContext(NamedTuple):
    """Context of a sum that a mechanism releases."""

    exposure: Exposure
    """Exposure that includes this attempt as the last."""
    secret: bytes
    """The run's secret, from which the keys of the noise are derived."""
    dtype: torch.dtype
    """Type of the released aggregate."""


def no_memory() -> State:
    """Return an empty state, for mechanisms without memory."""
    return {}


class Mechanism(NamedTuple):
    """A privacy mechanism. Its slots say where it acts; an empty slot changes nothing."""

    unit: Literal["client", "sample"]
    """What the guarantee hides the presence of."""
    neighbours: str
    """Description of the two data sets that cannot be distinguished. They are neighbours by RELATION."""
    delta: float
    """Probability with which the bound epsilon may fail, in (0, 1)."""
    epsilon: float | None
    """Privacy budget: a run stops before the round that would exceed it; None for no limit."""
    event: Callable[[Exposure], Any]
    """Exposure -> its dp_accounting.DpEvent; raises PlanError for an exposure that the mechanism does not cover."""
    steps: SampleSteps | None = None
    """Private steps of the local loop."""
    assumptions: tuple[str, ...] = ()
    """Conditions of the guarantee, one sentence each."""
    test_noise: bool = False
    """Whether all randomness derives from the plan's seed: repeatable for tests, without any protection."""
    clip: float = 0.0
    """Maximum norm of a whole update in the first round."""
    init: Callable[[], State] = no_memory
    """() -> the mechanism's first memory."""
    clip_of: Callable[[State], float] | None = None
    """Memory -> the clip of the next round, for an adaptive clip."""
    at_cut: CutNoise | None = None
    """Noise on the activations of split learning, at the client."""
    at_client: Callable[[Update, SendContext], Update] | None = None
    """Stacked updates inside their clients -> stacked updates that leave the clients."""
    on_grid: Callable[[Update, SendContext], Update] | None = None
    """Stacked updates as the server received them -> integers, of which only the sum is used."""
    release: Callable[[State, State, ReleaseContext], tuple[Aggregate, State]] | None = None
    """(sum on the grid, memory, context) -> (aggregate for the server's step, memory)."""
    sum_bound: Callable[[int], float] | None = None
    """Cohort size -> bound on the size of an entry of the sum, where the clients' integers include the noise.

    Secure aggregation may be used only if this slot is filled."""
    hides_cohort: bool = False
    """Whether the guarantee requires that the cohort and its size stay secret."""
    min_reports: Callable[[int], int] | None = None
    """Cohort size -> minimum number of reports, for a mechanism that needs one; else the policy's own holds."""
