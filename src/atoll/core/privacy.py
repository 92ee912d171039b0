"""Privacy: what protects a client or a sample, and what it has cost, stated by the object that runs.

A mechanism acts in up to three places: in the local loop (`steps`), on what a client sends (`at_client`), and on the
sum that the server makes (`on_grid`, `release`). Its `event` says what that gives away, for an accountant to add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from atoll.core.messages import Aggregate, State, Update
from atoll.core.params import ParamSpec


class Draws(NamedTuple):
    """How often a task draws each sample of a client."""

    rate: float
    """The chance of a sample to be in the batch of a step."""
    steps: int
    """The steps of one task."""
    client: int
    """A client of whom this is true."""


class Exposure(NamedTuple):
    """What has run, or will, as an accountant must know it."""

    scheme: str
    """How a cohort is drawn: the sampler's word for it."""
    rate: float
    """The chance of a client to be in the cohort of an attempt."""
    attempts: int
    """How often something was released, or may have been."""
    sample_rate: float
    """The chance of a sample to be in the batch of a step, for the client that is accounted for."""
    steps: int
    """The steps of one task, for the same client."""
    num_clients: int = 0
    """How many are registered; their number is no secret."""
    num_samples: int = 0
    """How many samples all clients train on together; their number is no secret."""
    groups: tuple[Draws, ...] = ()
    """The clients that may be the ones to account for; none where all are alike."""

    def each_group(self) -> list[Exposure]:
        """Return what each group of clients is exposed to."""
        return [self._replace(sample_rate=one.rate, steps=one.steps, groups=(one,)) for one in self.groups] or [self]

    @property
    def cohort(self) -> int:
        """How many clients an attempt asks, on average."""
        return max(1, round(self.rate * self.num_clients))

    @property
    def in_a_row(self) -> int:
        """In so many attempts in a row nobody is asked twice, where clients are asked in turn."""
        return max(1, self.num_clients // self.cohort)

    @property
    def participations(self) -> int:
        """How often a client can have been asked: once in each row of attempts if in turn, else in every one."""
        return -(-self.attempts // self.in_a_row) if self.scheme == IN_TURN else self.attempts


RELATION = "zero-out"
"""How neighbours differ: by one client, or sample, in whose place is one that counts for nothing.

How many there are is the same for both, so that it may be told, and may set rates, weights and denominators (Kairouz
et al. 2021, arXiv:2103.00039; dp-accounting calls it REPLACE_SPECIAL). Where each is drawn by a coin of its own, what
is released has the same two distributions as if one were added or removed, and so the same epsilon."""
IN_TURN = "in turn"
"""The scheme of samplers that ask everybody before they ask anybody again."""


class SampleSteps(NamedTuple):
    """How a client takes private steps: each sample's gradient is clipped, and noise is added to their sum."""

    clip: float
    """The largest length of one sample's gradient."""
    sigma: float
    """The noise's deviation, in units of `clip`."""
    share: float = 0.0
    """If above 0, the clip of a step is this share of the length of the client's own gradient, and not `clip`."""


class Sent(NamedTuple):
    """What is known of a stacked update that is to be protected."""

    spec: ParamSpec
    clip: float
    """The largest length that an update may have."""
    cohort: int
    """How many clients were asked."""
    key: Callable[[int], bytes]
    """Row -> the secret of this client and attempt."""


class Release(NamedTuple):
    """What is known of a sum that is to be released."""

    exposure: Exposure
    """With this attempt as the last."""
    secret: bytes
    dtype: torch.dtype


def nothing_kept() -> State:
    """Remember nothing from round to round."""
    return {}


class Mechanism(NamedTuple):
    """One way to protect. Slots say where it acts; those that are empty leave the run as it is."""

    unit: Literal["client", "sample"]
    """Whose presence is hidden."""
    neighbours: str
    """Which two data sets cannot be told apart, in words. They are neighbours by RELATION."""
    delta: float
    epsilon: float | None
    """The budget: a run stops before the round that would exceed it; None for no limit."""
    event: Callable[[Exposure], Any]
    """What has run -> its dp_accounting.DpEvent; raises a PlanError where the two do not fit."""
    steps: SampleSteps | None = None
    """Private steps of the local loop."""
    assumptions: tuple[str, ...] = ()
    """What must hold for the guarantee to hold, in plain words."""
    test_noise: bool = False
    """Whether all randomness comes from the plan's seed: to test and to repeat, never to protect."""
    clip: float = 0.0
    """The largest length of a whole update in the first round."""
    init: Callable[[], State] = nothing_kept
    """What it remembers from round to round."""
    clip_of: Callable[[State], float] | None = None
    """What it remembers -> the clip of the next round, where that changes."""
    at_client: Callable[[Update, Sent], Update] | None = None
    """Stacked updates before anything leaves their clients -> what leaves them."""
    on_grid: Callable[[Update, Sent], Update] | None = None
    """Stacked updates as they arrived -> whole numbers, whose sum is all that is made of them."""
    release: Callable[[State, State, Release], tuple[Aggregate, State]] | None = None
    """(the sum on the grid, memory) -> (what the server's step sees, memory)."""
    sum_bound: Callable[[int], float] | None = None
    """Size of a cohort -> what an entry of the sum stays below, where clients' own integers carry the noise.

    Then, and only then, secure aggregation may add them up."""
    hides_cohort: bool = False
    """Whether the guarantee needs that nobody knows who was asked, nor how many were."""
    min_reports: Callable[[int], int] | None = None
    """Size of a cohort -> how many of it must answer, where that is its business."""
