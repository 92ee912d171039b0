"""Views: what rules look at. Each is made where all that it needs has been built, and checked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm
from atoll.core.attack import Attack
from atoll.core.client_work import ClientWork
from atoll.core.contribution import Contribution
from atoll.core.coordinator import CoordinatorState, Policy
from atoll.core.defence import Defence
from atoll.core.detection import Detector
from atoll.core.downlink import Downlink
from atoll.core.params import ParamSpec
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure, Mechanism
from atoll.core.sampler import Sampler
from atoll.core.secagg import Secagg
from atoll.core.transform import Chain
from atoll.data.dataset import Public
from atoll.secagg.scheme import Scheme


class Simulated(NamedTuple):
    """A plan that a simulation runs."""

    plan: Plan


class Networked(NamedTuple):
    """A plan that organisations run together; a client knows the part of it that it is told."""

    plan: Plan
    sampler: Sampler


class Served(NamedTuple):
    """A plan that a server has built for clients of a network."""

    plan: Plan
    shares_model: bool
    """Whether the server has a whole model, which it can measure."""


class ServerSamples(NamedTuple):
    """What the server's own samples are picked from."""

    num: int
    """How many it wants."""
    source: str
    num_train: int
    public: Public | None


class NewClients(NamedTuple):
    """Clients that are held out of training, and what they are picked from."""

    plan: Plan
    policy: Policy
    num_clients: int
    """How many clients the data are dealt out to, new ones among them."""
    num_measurable: int
    """How many of these have held-out samples."""
    disjoint: bool
    """Whether no two clients hold the same sample."""

    @property
    def num(self) -> int:
        """How many new clients the plan wants."""
        return self.plan.evaluation.new_clients or 0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The built parts of a plan beside it, and what is known of its clients, data and model."""

    plan: Plan
    algorithm: Algorithm
    work: ClientWork
    aggregator: Aggregator
    policy: Policy
    sampler: Sampler
    uplink: Chain
    downlink: Downlink
    attack: Attack | None
    detector: Detector | None
    contribution: Contribution | None
    scheme: Scheme | None
    """How updates are added in secret, where they are."""
    mechanism: Mechanism | None
    every_round: Exposure
    """What the whole plan would expose if every round asked every client."""
    num_clients: int
    public: Public | None
    mixer: str | None
    """What in the model mixes samples or remembers them, by name."""
    kind: str
    """What is learnt, by the kind of its targets."""
    classes: bool
    """Whether each target is one of several classes, and the model has an output for each."""
    spec: ParamSpec
    """What travels of the model, and what clients keep."""
    tokens: bool = False
    """Whether samples are ids of tokens."""
    outputs: int = 0
    """How many outputs the model must have."""
    defences: tuple[Defence, ...] = ()
    """Defences of split learning."""

    @property
    def keeps(self) -> bool:
        """Whether clients keep parameters of the model."""
        return bool(self.spec.kept)

    @property
    def sends_models(self) -> bool:
        """Whether clients train models that travel, and send what changed of them."""
        return self.work.sends_models

    @property
    def goal(self) -> int:
        """How many updates make a version; the policy refuses more than there are clients."""
        return self.policy.goal(self.num_clients)

    @property
    def asked(self) -> int:
        """How many clients the first attempt asks."""
        return self.policy.num_wanted(CoordinatorState(), self.num_clients)

    @property
    def exposure(self) -> Exposure:
        """How clients and samples are drawn, of no attempt yet."""
        rate = min(1.0, self.asked / self.num_clients) if self.sampler.rate is None else self.sampler.rate
        return self.every_round._replace(scheme=self.sampler.scheme, rate=rate, attempts=0)

    @property
    def masks(self) -> Secagg:
        """How the plan adds in secret, for rules on plans that do."""
        assert self.plan.secagg is not None
        return self.plan.secagg

    @property
    def protection(self) -> Mechanism:
        """The mechanism, for rules on plans that have one."""
        assert self.mechanism is not None
        return self.mechanism


class Budget(NamedTuple):
    """What a private run may spend, and what it is exposed to."""

    mechanism: Mechanism
    exposure: Exposure


class Round(NamedTuple):
    """What a rehearsed round has shown."""

    plan: Plan
    mechanism: Mechanism | None
    exact: tuple[str, ...]
    """What an update holds that must arrive as it is: an algorithm's numbers, and batch-norm statistics."""
    least_bytes: int
    """Fewer bytes than this no round takes; 0 where that is not known."""
