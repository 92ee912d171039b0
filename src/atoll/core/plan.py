"""Plan: everything that defines a run, as plain data that maps one to one onto TOML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from atoll.core.errors import PlanError, nearest
from atoll.core.parts import Part

DEFAULT_NAMES = {
    "data": "digits",
    "partition": "iid",
    "model": "logistic",
    "algorithm": "fedavg",
    "policy": "cohort",
    "sampler": "uniform",
    "aggregator": "mean",
    "engine": "auto",
    "optimizer": "sgd",
    "schedule": "constant",
}

KINDS = {int: "whole number", float: "number", str: "text in quotes", bool: "true or false"}


class Section:
    """A table of a plan: knows how to be read from plain data and written back, and refuses unknown keys."""

    @classmethod
    def read(cls, data: Mapping[str, object], where: str = "") -> Self:
        """Make a section from plain data; unknown keys are errors that name the nearest one."""
        hints = get_type_hints(cls)
        for key in data:
            if key not in hints:
                raise PlanError(f"unknown key '{where}{key}' in the plan: {nearest(str(key), hints)}")
        return cls(**{key: _coerce(hints[key], value, where + key) for key, value in data.items()})

    def __post_init__(self) -> None:
        """Coerce what a caller in Python gave, so that strings and dicts work wherever parts and tables do."""
        for name, hint in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _coerce(hint, getattr(self, name), name))
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be right."""

    def to_dict(self) -> dict[str, Any]:
        """The section as plain data, without what is unset."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {key: value for key, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Part | Section):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """Turn plain data into what the field wants, or say what it wants."""
    if hint is Part:
        return Part.of(value, default=DEFAULT_NAMES.get(where.rpartition(".")[2], ""), where=where)
    if isinstance(hint, type) and issubclass(hint, Section):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return hint.read(value, f"{where}.")
        raise PlanError(f"'{where}' is a table: write [{where}] and its keys, got {value!r}")
    origin = get_origin(hint)
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce(get_args(hint)[0], item, where) for item in items)
    if origin in (Union, UnionType):
        return _coerce_union(get_args(hint), value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise PlanError(f"'{where}' cannot be {value!r}: {nearest(str(value), map(str, get_args(hint)))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise PlanError(f"'{where}' must be a {KINDS.get(hint, hint.__name__)}, got {value!r}")
    return value


def _coerce_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problem: PlanError | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return _coerce(option, value, where)
        except PlanError as error:
            problem = error
    assert problem is not None
    kinds = [_kind(option) for option in options if option is not type(None)]
    raise problem if len(kinds) == 1 else PlanError(f"'{where}' must be a {' or '.join(kinds)}, got {value!r}")


def _kind(hint: Any) -> str:
    """What a field wants, in words."""
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else KINDS.get(hint, hint.__name__)


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

    def check(self) -> None:
        """Refuse a server that cannot move."""
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

    def check(self) -> None:
        """Refuse targets that cannot be met."""
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise PlanError(f"stop.accuracy is a share in (0, 1], got {self.accuracy}; 97 % is 0.97")


@dataclass(frozen=True, kw_only=True)
class Attackers(Section):
    """Which clients attack, and from when on."""

    num: int | None = None
    fraction: float | None = None
    clients: tuple[int, ...] = ()
    start_round: int = 0

    def check(self) -> None:
        """Refuse contradictions."""
        if sum([self.num is not None, self.fraction is not None, bool(self.clients)]) > 1:
            raise PlanError("attackers: give one of num, fraction and clients")
        if self.num is not None and self.num < 0:
            raise PlanError(f"attackers.num must be 0 or more, got {self.num}")
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
    partition: Part = field(default_factory=lambda: Part("iid"))
    model: Part = field(default_factory=lambda: Part("logistic"))
    loss: str = "cross_entropy"
    algorithm: Part = field(default_factory=lambda: Part("fedavg"))
    local: Local = field(default_factory=Local)
    server: Server = field(default_factory=Server)
    policy: Part = field(default_factory=lambda: Part("cohort"))
    sampler: Part = field(default_factory=lambda: Part("uniform"))
    uplink: tuple[Part, ...] = ()
    aggregator: Part = field(default_factory=lambda: Part("mean"))
    attack: Part | None = None
    attackers: Attackers = field(default_factory=Attackers)
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
        if self.stop.accuracy is not None and self.evaluation.every == 0:
            raise PlanError("stop.accuracy needs evaluation.every of at least 1: nothing would be measured")

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
        """A new plan with dotted settings changed, such as {"algorithm.mu": 0.1}.

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
    if isinstance(part, dict) and isinstance(value, str) and "name" in part:
        table[key] = {"name": value}  # another part: the options of the old one do not apply
    else:
        table[key] = value
