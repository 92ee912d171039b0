"""Plan: everything that defines a run, as plain data that maps one to one onto TOML."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError
from atoll.core.options import Count, Positive, Range, Seed, Share, ShareBelowOne, above, at_least
from atoll.core.parts import Part
from atoll.core.secagg import Secagg
from atoll.core.section import Section
from atoll.core.split import Split

MAX_NORM = 1e9
"""The largest L2 norm of an update that counts, unless a plan says otherwise.

With weights of at most 1e7 neither the weighted sum of a million updates nor that of their squares (1e18 each) comes
near the largest float32, 3.4e38."""

ADAPT_STEPS = (0, 1, 5, 20)
"""After so many steps of adaptation new clients are measured, unless a plan says otherwise."""

SOLVES_FOR_ROUNDS = ("proportional",)
"""Mechanisms whose noise follows from the number of rounds, which is then part of what a run is."""


@dataclass(frozen=True, kw_only=True)
class Local(Section, key="local"):
    """What a client does with a task: how long it trains, in what batches, with what optimiser and step size."""

    epochs: Count | None = None
    """Passes over the client's data; 1 unless `steps` is given."""
    steps: Count | None = None
    """Number of optimiser steps, instead of epochs."""
    batch_size: Count | Literal["all"] | None = None
    """Samples a step, or "all"; 10 unless the algorithm says otherwise."""
    lr: Positive = 0.1
    optimizer: Part = field(default_factory=lambda: Part("sgd"))
    schedule: Part = field(default_factory=lambda: Part("constant"))
    """How lr changes with the rounds."""
    buffers: Literal["average", "local"] = "average"
    """Batch-norm statistics: averaged with the model, or never sent."""

    def check(self) -> None:
        """Refuse two amounts of work."""
        if self.epochs is not None and self.steps is not None:
            raise PlanError("local.epochs and local.steps are two ways to say one thing: leave one out")


@dataclass(frozen=True, kw_only=True)
class Server(Section, key="server"):
    """What the server does with an aggregate."""

    lr: Positive | None = None
    """Its step size; 1 unless the algorithm has one of its own."""
    samples: Annotated[int, at_least(1, "leave it out for none")] | None = None
    """Samples that the server looks at itself, picked by seed: for rules that compare, detection by loss and
    contribution."""
    source: Literal["clients", "public"] | None = None
    """Where they come from: copies of clients' training samples, as if unset, or the plan's `public` samples."""
    max_norm: Annotated[float, above(0, "1e300 rejects only what is not finite")] | None = None
    """An update with a larger L2 norm is rejected, like one that holds NaN; MAX_NORM unless given."""

    def check(self) -> None:
        """Refuse a source of samples that are none."""
        if self.source is not None and self.samples is None:
            raise PlanError(
                f'server.source is "{self.source}", but the server has no samples: set server.samples, e.g. to 100, '
                "or leave server.source out"
            )


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section, key="evaluation"):
    """What is measured, and how often; 0 means never, and the last round is always measured."""

    every: Annotated[int, at_least(0, "0 is never")] = 1
    """Rounds between evaluations on the central test set."""
    clients_every: Annotated[int, at_least(0, "0 is never")] = 0
    """Rounds between evaluations on every client's own data."""
    max_clients: Count = 1000
    """At most so many clients are evaluated, picked by seed."""
    metrics: tuple[Part, ...] | None = None
    """What is measured; the metrics of the problem if left out."""
    holdout: ShareBelowOne = 0.0
    """Share of each client's samples that it does not train on but is evaluated on; at 0 its training data serve."""
    validation: ShareBelowOne | None = None
    """Share of each client's samples that it neither trains on nor is evaluated on: by these it chooses between
    models, where an algorithm lets it."""
    new_clients: Count | None = None
    """So many clients, picked by seed, take no part in training; at the end they adapt what was learnt, and are
    measured."""
    adapt_steps: tuple[Annotated[int, at_least(0, "0 is what a client gets on arrival")], ...] | None = None
    """After how many steps on their own samples new clients are measured; ADAPT_STEPS unless given."""

    def check(self) -> None:
        """Refuse shares that leave nothing to train on, and steps that nobody takes or that do not rise."""
        steps = self.adapt_steps
        if steps is not None and self.new_clients is None:
            raise PlanError(
                f"evaluation.adapt_steps is {list(steps)}, but there are no new clients: set evaluation.new_clients, "
                "e.g. to 10, or leave evaluation.adapt_steps out"
            )
        if steps is not None and (not steps or list(steps) != sorted(set(steps))):
            raise PlanError(
                f"evaluation.adapt_steps must be numbers of steps that rise, got {list(steps)}: write them as "
                f"{list(ADAPT_STEPS)}, or leave it out"
            )
        if self.holdout + (self.validation or 0.0) >= 1:
            raise PlanError(
                f"evaluation.holdout and evaluation.validation are {self.holdout} and {self.validation} of a client's "
                "samples, which leaves none to train on: lower them"
            )


NO_LIMIT = "leave it out for no limit"


@dataclass(frozen=True, kw_only=True)
class Stop(Section, key="stop"):
    """When to stop before the last round."""

    accuracy: Annotated[float, Range(0, 1, open_low=True, hint="97 % is 0.97")] | None = None
    """Central test accuracy, in [0, 1], that is good enough."""
    bytes: Annotated[int, above(0, NO_LIMIT)] | None = None
    """Bytes sent up and down in all, never more: a round that would take more is not run."""
    seconds: Annotated[float, above(0, NO_LIMIT)] | None = None
    """Seconds of this machine."""
    simulated_seconds: Annotated[float, above(0, NO_LIMIT)] | None = None
    """Seconds of the simulated devices."""
    samples: Annotated[int, above(0, NO_LIMIT)] | None = None
    """Samples that clients have trained on, every pass counted: what their computing costs."""


@dataclass(frozen=True, kw_only=True)
class Attackers(Section, key="attackers"):
    """Which clients attack, and from when on."""

    num: Annotated[int, at_least(0)] | None = None
    fraction: Share | None = None
    clients: tuple[Annotated[int, at_least(0)], ...] = ()
    added: Annotated[int, at_least(0)] | None = None
    """So many clients join to attack, while all others stay honest; each draws its samples from all of them."""
    start_round: Annotated[int, at_least(0)] = 0
    num_rounds: Annotated[int, at_least(1, "leave attack out for none")] | None = None
    """For how many rounds they attack, 1 for a single shot; to the end if left out."""

    def check(self) -> None:
        """Refuse contradictions."""
        if sum([*(way is not None for way in (self.num, self.fraction, self.added)), bool(self.clients)]) > 1:
            raise PlanError("attackers: give one of num, fraction, clients and added")


@dataclass(frozen=True, kw_only=True)
class Plan(Section):
    """Everything that defines a run. Strings and dicts stand for parts and tables, as in TOML.

    >>> Plan(algorithm={"name": "fedprox", "mu": 0.1}).algorithm
    Part('fedprox', mu=0.1)
    """

    is_whole: ClassVar[bool] = True
    """A plan is no option of a part; whoever builds a part may pass it one."""

    name: str = ""
    seed: Seed = 0
    rounds: Annotated[int, at_least(0)] = 20
    data: Part = field(default_factory=lambda: Part("digits"))
    public: Part | None = None
    """Samples that everybody may look at: `held_out` of the training samples, or the features of another data set."""
    partition: Part = field(default_factory=lambda: Part("iid"))
    model: Part = field(default_factory=lambda: Part("logistic"))
    models: tuple[Part, ...] | None = None
    """Models that are dealt out to clients in turn, where each keeps its own, instead of one `model` for all."""
    problem: Part | None = None
    """What is learnt: `classification`, `regression` and others; what the targets look like if left out."""
    loss: Part | None = None
    """What clients minimise; that of the problem if left out."""
    algorithm: Part = field(default_factory=lambda: Part("fedavg"))
    share: tuple[str, ...] | None = None
    """What travels of the model, by patterns such as "body.*"; clients train the rest too, and keep it."""
    keep: tuple[str, ...] | None = None
    """What clients keep of the model, instead of `share`: patterns such as "head.*", or "norms" for all norm layers."""
    work: Part | None = None
    """What clients do with a task, if that is not steps of gradient descent or what the algorithm says."""
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
    split: Split | None = None
    """Where the model is cut between clients and server, which then exchange activations; every client trains all of
    it if left out."""
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
        """Refuse an empty list of models; what parts make of each other is checked when they are built."""
        if self.models is not None and not self.models:
            raise PlanError("models is empty, got []: name at least one, or leave it out")
        if self.share is not None and self.keep is not None:
            raise PlanError("share and keep are two ways to say one thing: leave one out")
        for key in ("share", "keep"):
            if getattr(self, key) == ():
                raise PlanError(f"{key} is empty, got []: name at least one pattern, or leave it out")

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Read a plan from TOML text."""
        try:
            plain = tomllib.loads(text)
        except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
            raise PlanError(f"the plan is not valid TOML: {error}") from error
        return cls.read(plain)

    def to_toml(self) -> str:
        """Write the plan as TOML text; `from_toml` gives the same plan back."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def identity(self) -> str:
        """A hash of what decides the model: not the engine, the name, or how long to go on."""
        plain = self.to_dict()
        for key in ("engine", "name", "stop", *(() if self._solves_for_rounds else ("rounds",))):
            plain.pop(key, None)
        loss = plain.pop("loss", {"name": "cross_entropy"})
        plain["loss"] = loss["name"] if len(loss) == 1 else loss
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    @property
    def _solves_for_rounds(self) -> bool:
        """Whether noise was chosen for so many rounds: with more of them, those before had too little."""
        return self.privacy is not None and self.privacy.name in SOLVES_FOR_ROUNDS

    def replace(self, settings: Mapping[str, object]) -> Plan:
        """A new plan with dotted settings changed, such as {"algorithm.mu": 0.1}; None leaves a setting out.

        >>> Plan().replace({"local.lr": 0.5}).local.lr
        0.5
        """
        plain = self.to_dict()
        for path, value in copy.deepcopy(dict(settings)).items():  # later settings may change earlier tables
            _put(plain, path, value)
        changed = type(self).read(plain)
        for key, part in vars(self).items():
            if isinstance(part, Part) and part.call is not None and getattr(changed, key) == part:
                object.__setattr__(changed, key, part)  # a name alone may not lead to a function or an object
        return changed


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
