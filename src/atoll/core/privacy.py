"""Privacy: what protects a client or a sample, and what it has cost, stated by the object that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Exposure(NamedTuple):
    """What has run, or will, as an accountant must know it."""

    scheme: str
    """How a cohort is drawn: the sampler's word for it."""
    rate: float
    """The chance of a client to be in the cohort of an attempt."""
    attempts: int
    """How often something was released, or may have been."""
    sample_rate: float
    """The chance of a sample to be in the batch of a step, for the client where it is largest."""
    steps: int
    """The steps of one task, for the client where there are most."""


class SampleSteps(NamedTuple):
    """How a client takes private steps: each sample's gradient is clipped, and noise is added to their sum."""

    clip: float
    """The largest length of one sample's gradient."""
    sigma: float
    """The noise's deviation, in units of `clip`."""
    share: float = 0.0
    """If above 0, the clip of a step is this share of the length of the client's own gradient, and not `clip`."""


class Mechanism(NamedTuple):
    """One way to protect. Slots say where it acts; those that are empty leave the run as it is."""

    unit: Literal["client", "sample"]
    """Whose presence is hidden."""
    neighbours: str
    """Which two data sets cannot be told apart, such as "add or remove one client"."""
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
