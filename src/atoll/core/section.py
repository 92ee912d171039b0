"""Section: a table of a plan, read from plain data and written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

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
    "scheme": "pairwise",
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
