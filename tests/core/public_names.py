"""The public names of Atoll as text: their parameters, fields and methods, the members of families, and commands.

`python tests/core/public_names.py` writes public_api.txt anew. Look at what changed before you commit it: a line that
goes or changes breaks a promise of docs/stability.md; one that is added is a new promise.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from atoll.cli.main import app
from atoll.core import parts
from atoll.core.options import is_plain, option_hints

FILE = Path(__file__).with_name("public_api.txt")
PAGE = Path(__file__).parents[2] / "docs" / "stability.md"
TABLE = re.compile(r"^\| `(atoll[\w.]*)` \| ((?:`\w+` ?)+)\|$", re.MULTILINE)
SOURCE = Path(__file__).parents[2] / "src" / "atoll"


def public_names() -> dict[str, list[str]]:
    """Return what docs/stability.md calls public: names of each module, and `Class.method` for those of `atoll`."""
    page = PAGE.read_text()
    rows = page.partition("| from `atoll` |")[2].partition("\n\n")[0]
    own: list[str] = []
    for name, text in re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.MULTILINE):
        kind = getattr(importlib.import_module("atoll"), name)
        own += [name, *(f"{name}.{word}" for word in re.findall(r"`(\w+)`", text) if hasattr(kind, word))]
    return {"atoll": own} | {module: re.findall(r"\w+", listed) for module, listed in TABLE.findall(page)}


def described(module: str, name: str) -> str:
    """Return a line for a function or method, or for a class with its fields."""
    value: Any = importlib.import_module(module)
    for word in name.split("."):
        value = getattr(value, word)
    path = f"{module}.{name}"
    if isinstance(value, type):
        return f"{path}: {', '.join(_fields(value))}".removesuffix(": ")
    return f"{path}{_signature(value)}" if inspect.isroutine(value) else path


def _signature(function: Any) -> str:
    """Return names and defaults of parameters; annotations may change."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))


def _fields(kind: type) -> list[str]:
    """Return a class's fields, those with defaults marked by `=`, or the parameters of its constructor."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return [
            f.name + ("=" if (f.default, f.default_factory) != (missing, missing) else "")
            for f in dataclasses.fields(kind)
        ]
    if hasattr(kind, "_fields"):
        defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
        return [name + ("=" if name in defaults else "") for name in kind._fields]
    if issubclass(kind, Exception):
        return []
    return [_signature(kind)[1:-1]]


def families() -> list[str]:
    """Return every family that parts of a plan are looked up in."""
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    return sorted({name for text in texts for name in re.findall(r'\b(?:build|find)\("([a-z_.]+)"', text)})


def members(family: str) -> Iterator[str]:
    """Yield a line for each member of a family, with the options that a plan may give."""
    for name in parts.members(family):
        function = parts.find(family, name)
        hints = option_hints(function)
        options = [p for p in inspect.signature(function).parameters.values() if is_plain(hints.get(p.name, object))]
        texts = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in options]
        yield f"{family}/{name}({', '.join(texts)})"


def commands(command: Any, name: str = "atoll") -> Iterator[str]:
    """Yield a line for each command, with its arguments and options."""
    if hasattr(command, "commands"):
        for word, inner in sorted(command.commands.items()):
            yield from commands(inner, f"{name} {word}")
        return
    arguments = [p.name.upper() for p in command.params if not p.opts[0].startswith("-")]
    yield " ".join([name, *arguments, *sorted(o for p in command.params for o in p.opts if o.startswith("--"))])


def lines() -> list[str]:
    """Return all public names, a line each."""
    names = [described(module, name) for module, names in public_names().items() for name in names]
    catalogue = [line for family in families() for line in members(family)]
    return [*names, *catalogue, *commands(typer.main.get_command(app))]


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
