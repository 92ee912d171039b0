"""Section: a table of a plan, read from plain data and written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Self, get_args, get_type_hints

from atoll.core.errors import PlanError
from atoll.core.options import read_value
from atoll.core.parts import Part
from atoll.core.suggestions import suggest


class Section:
    """A table of a plan: knows how to be read from plain data and written back, and refuses unknown keys.

    Its fields say by their annotations what they may be, as the options of parts do. `key` is its place in the plan.
    """

    key: ClassVar[str] = ""
    in_words: ClassVar[str] = "a table"

    def __init_subclass__(cls, *, key: str = "") -> None:
        cls.key = key

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Refuse unknown fields before any is looked at; the error names the nearest one, or where it belongs."""
        hints = _hints(cls)
        for field in fields:
            if field not in hints:
                raise PlanError(f"unknown key '{cls._key(field)}' in the plan: {suggest(field, hints, cls.key)}")
        return super().__new__(cls)

    @classmethod
    def read(cls, data: Mapping[str, object]) -> Self:
        """Make a section from plain data; unknown keys are errors that name the nearest one."""
        return cls(**{str(key): value for key, value in data.items()})

    @classmethod
    def from_plain(cls, value: object, where: str) -> Self:
        """Read a section that is the value of a setting."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.read(value)
        raise PlanError(f"'{where}' is a table: write [{where}] and its keys, got {value!r}")

    @classmethod
    def dotted_keys(cls) -> list[str]:
        """The keys of this table and of those in it, such as `local` and `local.lr`."""
        found = []
        for field, hint in _hints(cls).items():
            tables = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, Section)]
            found += [cls._key(field), *(key for table in tables for key in table.dotted_keys())]
        return found

    @classmethod
    def _key(cls, field: str) -> str:
        return f"{cls.key}.{field}" if cls.key else field

    def __post_init__(self) -> None:
        """Read what a caller gave, so that strings and dicts work wherever parts and tables do, and check it."""
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, read_value(hint, getattr(self, name), self._key(name)))
        self.check()

    def check(self) -> None:
        """Refuse values that do not go together; each by itself is checked by its annotation."""

    def to_dict(self) -> dict[str, Any]:
        """The section as plain data, without what is unset."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {key: value for key, value in plain.items() if value is not None}


def _read_hints(cls: Any) -> dict[str, Any]:
    """The fields of a section and what they may be."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)


def _plain(value: Any) -> Any:
    if isinstance(value, Part | Section):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
