"""The members that tests of a whole family are run over: all that lie in its folder, or those of `--member`."""

from __future__ import annotations

from typing import Any

from atoll.core.parts import Part, examples, members
from atoll.testing import Case

CHOSEN: dict[str, list[str]] = {}
"""What `--member` names, by family."""


def every(family: str) -> list[str]:
    """The names of a family's members."""
    return CHOSEN.get(family) or members(family)


def every_example(family: str) -> list[Part]:
    """The members of a family, with all of their examples."""
    return [Part(name, **options) for name in every(family) for options in examples(family, name)]


def concerns(callspec: Any) -> bool:
    """Whether the parameters of a test name a chosen member."""
    values = callspec.params.values() if callspec is not None else ()
    parts = [value.member.part if isinstance(value, Case) else value for value in values]
    names = [part.name if isinstance(part, Part) else part for part in parts if isinstance(part, Part | str)]
    return any(name in chosen for name in names for chosen in CHOSEN.values())
