"""Law: what every member of a family must satisfy, as a function of one member.

The laws of a family are the functions marked with `law` in `atoll.testing.<family>`, found by importing that module: a
family gets its laws by one new file here, and a member is held to them the moment it exists.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from atoll.core.errors import AtollError, PlanError, nearest
from atoll.core.messages import State
from atoll.core.parts import Part, examples, members
from atoll.core.tensor_file import DTYPES, tensor_file
from atoll.engine.pipes import receive, send

SEED = 3
TOOLS = ("__main__", "examples", "law", "runs")
"""Modules of this package that are not named after a family."""


class LawError(AssertionError):
    """A member that breaks a law of its family; the message says by how much, and what to do."""


class Member(NamedTuple):
    """A member of a family with its settings."""

    family: str
    part: Part

    def build(self) -> Any:
        """Build it anew: two builds share no memory."""
        return self.part.build(self.family, seed=SEED)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.part.options.items())
        return f"{self.part.name}({options})" if options else self.part.name


class Law(NamedTuple):
    """One law: a check that raises, and the trait of the contract that says whether it applies."""

    check: Callable[[Member], None]
    when: str = ""
    unless: str = ""

    def __str__(self) -> str:
        return self.check.__name__.replace("_", " ")

    def applies(self, built: Any) -> bool:
        """Return whether this law is about a member with these traits; one that is None or False is not there."""
        wanted = not self.when or bool(getattr(built, self.when))
        return wanted and not (self.unless and getattr(built, self.unless))


class Case(NamedTuple):
    """One law for one member."""

    member: Member
    law: Law

    def check(self) -> None:
        """Raise LawError if the member breaks the law, or fails."""
        try:
            self.law.check(self.member)
        except LawError as error:
            raise LawError(f"{self}: {error}") from error
        except Exception as error:
            raise LawError(f"{self}: it fails with {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        return f"{self.member.family} {self.member}: {self.law}"


def law(*, when: str = "", unless: str = "") -> Callable[[Callable[[Member], None]], Law]:
    """Make a law of a check; it is for members that have the trait `when`, and not for those that have `unless`."""
    return lambda check: Law(check, when, unless)


@law()
def it_is_built_by_its_example(member: Member) -> None:
    """Ask for an EXAMPLE of every option that has no default, and for what the family's functions return."""
    try:
        built = member.build()
    except AtollError as error:
        raise LawError(f"{error}; set EXAMPLE = {{...}} in its module to options that it can be built with") from error
    contract = _module(member.family).CONTRACT
    must(isinstance(built, contract), f"it returns {type(built).__name__}: return {contract.__name__}(...)")


def families() -> list[str]:
    """Return the families that have laws, by listing this folder; `train_works.py` has those of `train.works`."""
    folder = importlib.import_module("atoll.testing").__path__
    names = [module.name for module in pkgutil.iter_modules(folder) if module.name not in TOOLS]
    return [name.replace("_", ".") for name in names]


def _module(family: str) -> Any:
    if family not in families():
        raise PlanError(f"there are no laws for '{family}': {nearest(family, families())}")
    return importlib.import_module(f"atoll.testing.{family.replace('.', '_')}")


def laws(family: str) -> list[Law]:
    """Return the laws of a family, in the order in which they are written."""
    return [it_is_built_by_its_example, *(each for each in vars(_module(family)).values() if isinstance(each, Law))]


def cases(family: str, *chosen: str | Callable[..., Any] | Part) -> list[Case]:
    """Return every law of a family for these members, or for all of the package, each with all of its examples.

    A member is a name, `module:function`, a function, or a `Part`, whose options then take the place of the examples.

    >>> [str(case) for case in cases("aggregators", "mean")][0]
    'aggregators mean: it is built by its example'
    """
    _module(family)  # before a member is sought in a family that is not there
    found = []
    for each in chosen or members(family):
        part = Part.of(each, where="")
        settings = [part.options] if part.options else examples(family, part.call or part.name)
        for options in settings:
            member = Member(family, Part(part.call or part.name, **options))
            found += [Case(member, each_law) for each_law in _applicable(member)]
    return found


def _applicable(member: Member) -> list[Law]:
    """Return the laws that a member's traits ask for; only the first, which then tells why, if it cannot be built."""
    try:
        it_is_built_by_its_example.check(member)
    except LawError:
        return [it_is_built_by_its_example]
    built = member.build()
    return [each for each in laws(member.family) if each.applies(built)]


def check(family: str, *chosen: str | Callable[..., Any] | Part) -> int:
    """Check every law of a family for these members, and return how many held; raise LawError at the first broken."""
    every = cases(family, *chosen)
    for case in every:
        case.check()
    return len(every)


def must(condition: bool, why: str) -> None:
    """Raise LawError unless the condition holds."""
    if not condition:
        raise LawError(why)


def must_be_close(found: Tensor, expected: Tensor, why: str, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Raise LawError unless two tensors have one shape and type, and the same values up to a tolerance."""
    try:
        torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, equal_nan=True)
    except AssertionError as error:
        raise LawError(f"{why} ({' '.join(str(error).split())})") from error


def must_be_equal(found: State, expected: State, why: str) -> None:
    """Raise LawError unless named tensors are equal to the bit."""
    must(found.keys() == expected.keys(), f"{why} (names are {sorted(found)} and {sorted(expected)})")
    for name, value in expected.items():
        must_be_close(found[name], value, f"{why}: {name}")


def must_be_state(state: object, what: str) -> None:
    """Raise LawError unless something is named tensors that can be sent to a process and written to a file."""
    plain = isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.dtype in DTYPES and not value.requires_grad
        for name, value in state.items()
    )
    must(plain, f"{what} must be a dict of plain tensors by name, got {state!r}: wrap numbers as torch.tensor(...)")


def written(state: State) -> State:
    """Return named tensors as they come back from a checkpoint."""
    return load(b"".join(tensor_file(state)))


def crossed(state: State) -> State:
    """Return named tensors as they come out of a pipe between processes."""
    here, there = Pipe()
    send(here, {}, state)
    return receive(there)[1]
