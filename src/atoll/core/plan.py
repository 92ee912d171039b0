"""Plan: everything that defines a run, as plain data that maps one to one onto TOML."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.secagg import Secagg
from atoll.core.section import Section

MAX_NORM = 1e9
"""The largest L2 norm of an update that counts, unless a plan says otherwise.

With weights of at most 1e7 neither the weighted sum of a million updates nor that of their squares (1e18 each) comes
near the largest float32, 3.4e38."""


@dataclass(frozen=True, kw_only=True)
class Local(Section):
    """What a client does with a task: how long it trains, in what batches, with what optimiser and step size."""

    epochs: int | None = None
    """Passes over the client's data; 1 unless `steps` is given."""
    steps: int | None = None
    """Number of optimiser steps, instead of epochs."""
    batch_size: int | Literal["all"] | None = None
    """Samples a step, or "all"; 10 unless the algorithm says otherwise."""
    lr: float = 0.1
    optimizer: Part = field(default_factory=lambda: Part("sgd"))
    schedule: Part = field(default_factory=lambda: Part("constant"))
    """How lr changes with the rounds."""
    buffers: Literal["average", "local"] = "average"
    """Batch-norm statistics: averaged with the model, or never sent."""

    def check(self) -> None:
        """Refuse amounts of work that make no sense."""
        if self.epochs is not None and self.steps is not None:
            raise PlanError("local.epochs and local.steps are two ways to say one thing: leave one out")
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise PlanError(f"local.{name} must be at least 1, got {value}")
        if not self.lr > 0:
            raise PlanError(f"local.lr must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Server(Section):
    """What the server does with an aggregate."""

    lr: float | None = None
    """Its step size; 1 unless the algorithm has one of its own."""
    samples: int | None = None
    """Samples of the training set, picked by seed, for rules that compare, detection by loss and contribution."""
    max_norm: float | None = None
    """An update with a larger L2 norm is rejected, like one that holds NaN; MAX_NORM unless given."""

    def check(self) -> None:
        """Refuse a server that cannot move."""
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise PlanError(
                f"server.max_norm must be a finite number above 0, got {self.max_norm}; leave it out for {MAX_NORM:g}, "
                "or set it to 1e300 to reject only what is not finite"
            )
        if self.samples is not None and self.samples < 1:
            raise PlanError(f"server.samples must be at least 1, got {self.samples}; leave it out for none")
        if self.lr is not None and not self.lr > 0:
            raise PlanError(f"server.lr must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """What is measured, and how often; 0 means never, and the last round is always measured."""

    every: int = 1
    """Rounds between evaluations on the central test set."""
    clients_every: int = 0
    """Rounds between evaluations on every client's own data."""
    max_clients: int = 1000
    """At most so many clients are evaluated, picked by seed."""
    holdout: float = 0.0
    """Share of each client's samples that it does not train on but is evaluated on; at 0 its training data serve."""

    def check(self) -> None:
        """Refuse impossible frequencies and shares."""
        for name in ("every", "clients_every"):
            if getattr(self, name) < 0:
                raise PlanError(f"evaluation.{name} must be 0 (never) or more, got {getattr(self, name)}")
        if self.max_clients < 1:
            raise PlanError(f"evaluation.max_clients must be at least 1, got {self.max_clients}")
        if not 0 <= self.holdout < 1:
            raise PlanError(f"evaluation.holdout must be in [0, 1), got {self.holdout}")


@dataclass(frozen=True, kw_only=True)
class Stop(Section):
    """When to stop before the last round."""

    accuracy: float | None = None
    """Central test accuracy, in [0, 1], that is good enough."""
    bytes: int | None = None
    """Bytes sent up and down in all, never more: a round that would take more is not run."""
    seconds: float | None = None
    """Seconds of this machine."""
    simulated_seconds: float | None = None
    """Seconds of the simulated devices."""
    samples: int | None = None
    """Samples that clients have trained on, every pass counted: what their computing costs."""

    def check(self) -> None:
        """Refuse targets that cannot be met."""
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise PlanError(f"stop.accuracy is a share in (0, 1], got {self.accuracy}; 97 % is 0.97")
        for name in ("bytes", "seconds", "simulated_seconds", "samples"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"stop.{name} must be above 0, got {value}; leave it out for no limit")


@dataclass(frozen=True, kw_only=True)
class Attackers(Section):
    """Which clients attack, and from when on."""

    num: int | None = None
    fraction: float | None = None
    clients: tuple[int, ...] = ()
    added: int | None = None
    """So many clients join to attack, while all others stay honest; each draws its samples from all of them."""
    start_round: int = 0
    num_rounds: int | None = None
    """For how many rounds they attack, 1 for a single shot; to the end if left out."""

    def check(self) -> None:
        """Refuse contradictions."""
        if self.num_rounds is not None and self.num_rounds < 1:
            raise PlanError(
                f"attackers.num_rounds must be at least 1, got {self.num_rounds}; leave attack out for none"
            )
        if sum([*(way is not None for way in (self.num, self.fraction, self.added)), bool(self.clients)]) > 1:
            raise PlanError("attackers: give one of num, fraction, clients and added")
        for name in ("num", "added"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PlanError(f"attackers.{name} must be 0 or more, got {value}")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise PlanError(f"attackers.fraction must be in [0, 1], got {self.fraction}")


@dataclass(frozen=True, kw_only=True)
class Plan(Section):
    """Everything that defines a run. Strings and dicts stand for parts and tables, as in TOML.

    >>> Plan(algorithm={"name": "fedprox", "mu": 0.1}).algorithm
    Part('fedprox', mu=0.1)
    """

    name: str = ""
    seed: int = 0
    rounds: int = 20
    data: Part = field(default_factory=lambda: Part("digits"))
    public: Part | None = None
    """Samples that everybody may look at: `held_out` of the training samples, or the features of another data set."""
    partition: Part = field(default_factory=lambda: Part("iid"))
    model: Part = field(default_factory=lambda: Part("logistic"))
    models: tuple[Part, ...] | None = None
    """Models that are dealt out to clients in turn, where each keeps its own, instead of one `model` for all."""
    loss: str = "cross_entropy"
    algorithm: Part = field(default_factory=lambda: Part("fedavg"))
    local: Local = field(default_factory=Local)
    server: Server = field(default_factory=Server)
    policy: Part = field(default_factory=lambda: Part("cohort"))
    sampler: Part = field(default_factory=lambda: Part("uniform"))
    devices: Part | None = None
    """How fast clients are and when they can be reached, in simulated time; at once and always if left out."""
    eligibility: Eligibility = field(default_factory=Eligibility)
    uplink: tuple[Part, ...] = ()
    """What an update goes through on its way up, in this order."""
    downlink: tuple[Part, ...] = ()
    """What a broadcast goes through on its way down; `delta` first sends differences."""
    aggregator: Part = field(default_factory=lambda: Part("mean"))
    secagg: Secagg | None = None
    """How the server learns the sum of updates and nothing else; it sees each update if left out."""
    privacy: Part | None = None
    """What protects clients or their samples by noise, such as `central` or `sample`."""
    attack: Part | None = None
    attackers: Attackers = field(default_factory=Attackers)
    detection: Part | None = None
    """How clients lose the server's trust, and are not asked any more: `distance`, `cosine` or `loss`."""
    contribution: Part | None = None
    """How each round's gain is shared out to its clients, such as `gtg_shapley`, measured on `server.samples`."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    stop: Stop = field(default_factory=Stop)
    engine: Part = field(default_factory=lambda: Part("auto"))

    if TYPE_CHECKING:  # names, dicts and functions stand for parts and tables, which no field's type can say

        def __init__(self, **fields: Any) -> None: ...

    def check(self) -> None:
        """Refuse what cannot be right whatever the parts are; parts check their own options when they are built."""
        if self.rounds < 0:
            raise PlanError(f"rounds must be 0 or more, got {self.rounds}")
        if self.seed < 0:
            raise PlanError(f"seed must be 0 or more, got {self.seed}")
        if self.models is not None and not self.models:
            raise PlanError("models is empty: name at least one, or leave it out")
        if self.stop.accuracy is not None and self.evaluation.every == 0:
            raise PlanError("stop.accuracy needs evaluation.every of at least 1: nothing would be measured")
        if self.devices is None and self.stop.simulated_seconds is not None:
            raise PlanError("stop.simulated_seconds needs devices that take time: set devices, e.g. to fleet")

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Read a plan from TOML text."""
        try:
            return cls.read(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan is not valid TOML: {error}") from error

    def to_toml(self) -> str:
        """Write the plan as TOML text; `from_toml` gives the same plan back."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def identity(self) -> str:
        """A hash of what decides the model: not the engine, the name, or how long to go on."""
        plain = self.to_dict()
        for key in ("engine", "name", "rounds", "stop"):
            plain.pop(key, None)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def replace(self, settings: Mapping[str, object]) -> Plan:
        """A new plan with dotted settings changed, such as {"algorithm.mu": 0.1}; None leaves a setting out.

        >>> Plan().replace({"local.lr": 0.5}).local.lr
        0.5
        """
        plain = self.to_dict()
        for path, value in settings.items():
            _put(plain, path, value)
        return type(self).read(plain)


def _put(table: dict[str, Any], path: str, value: object) -> None:
    *tables, key = path.split(".")
    for name in tables:
        inner = table.setdefault(name, {})
        if isinstance(inner, str):
            inner = table[name] = {"name": inner}
        if not isinstance(inner, dict):
            raise PlanError(f"cannot set '{path}': '{name}' is not a table")
        table = inner
    part = table.get(key)
    if value is None:
        table.pop(key, None)
    elif isinstance(part, dict) and isinstance(value, str) and "name" in part:
        table[key] = {"name": value}  # another part: the options of the old one do not apply
    else:
        table[key] = value
