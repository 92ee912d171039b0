"""Section: a table of a plan, read from and written to plain data."""

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
    """A table of a plan, read from and written to plain data; unknown keys are errors.

    The annotations of its fields define the allowed values, as for the options of parts.
    """

    key: ClassVar[str] = ""
    """Dotted key of the table in the plan; empty for the plan itself."""
    in_words: ClassVar[str] = "a table"
    """Description of the type in error messages."""

    def __init_subclass__(cls, *, key: str = "") -> None:
        cls.key = key

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Refuse unknown fields before any is read; the error names the nearest known one, or its right place."""
        hints = _hints(cls)
        for field in fields:
            if field not in hints:
                raise PlanError(f"unknown key '{cls._key(field)}' in the plan: {suggest(field, hints, cls.key)}")
        return super().__new__(cls)

    @classmethod
    def read(cls, data: Mapping[str, object]) -> Self:
        """Return the section of plain data; unknown keys are errors that name the nearest one."""
        return cls(**{str(key): value for key, value in data.items()})

    @classmethod
    def from_plain(cls, value: object, where: str) -> Self:
        """Return the section that is the value of a setting, `where` being its key."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.read(value)
        raise PlanError(f"'{where}' is a table: write [{where}] and its keys, got {value!r}")

    @classmethod
    def dotted_keys(cls) -> list[str]:
        """Return the keys of this table and of its tables, such as `local` and `local.lr`."""
        keys = []
        for field, hint in _hints(cls).items():
            tables = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Section)]
            keys += [cls._key(field), *(key for table in tables for key in table.dotted_keys())]
        return keys

    @classmethod
    def _key(cls, field: str) -> str:
        return f"{cls.key}.{field}" if cls.key else field

    def __post_init__(self) -> None:
        """Convert strings and dicts to parts and tables, and check all values."""
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, read_value(hint, getattr(self, name), self._key(name)))
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other; single values are checked by their annotations."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain data, without values that are None."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {key: value for key, value in plain.items() if value is not None}


def _read_hints(cls: Any) -> dict[str, Any]:
    """Return the annotations of a section's fields, by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)


def _plain(value: Any) -> Any:
    if isinstance(value, Part | Section):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
