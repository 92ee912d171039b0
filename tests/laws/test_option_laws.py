"""Every option of every member of every family says what it may be, and rubbish is refused by name.

Families are listed here, members are found by listing their folders, and options by the signatures. A member with a
required option brings an `EXAMPLE` of what it needs, the first of its `EXAMPLES` if it has several.
"""

from __future__ import annotations

import inspect
import math
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from members import every

from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError
from atoll.core.options import is_plain, option_hints, split
from atoll.core.parts import Part, examples, find
from atoll.core.plan import Attackers, Evaluation, Local, Plan, Server, Stop
from atoll.core.privacy import Exposure
from atoll.core.secagg import Secagg
from atoll.core.section import Section
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset
from atoll.data.partition.iid import iid
from atoll.engine.base import unheard
from atoll.train.build import build_job
from atoll.train.job import Job

FAMILIES = (
    "algorithms",
    "rounds",
    "rounds.samplers",
    "rounds.devices",
    "transforms",
    "aggregators",
    "attacks",
    "detection",
    "contribution",
    "metrics",
    "models",
    "data.catalog",
    "data.partition",
    "data.skew",
    "data.public",
    "privacy.mechanisms",
    "secagg.schemes",
    "train.optimizers",
    "train.schedules",
    "train.works",
    "engine",
)
"""All but the losses, which are functions of tensors and have no options."""
PARTS = [(family, name) for family in FAMILIES for name in every(family)]
RUBBISH = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "text": "8",
    "list": [],
    "table": {},
    "true": True,
    "-1": -1,
    "0": 0,
    "half": 0.5,
    "tiny": 1e-300,
    "huge": 1e300,
    "large": 10**18,
    "larger": 10**30,
    "largest": 10**400,
}
SECONDS = 120
"""After which a build hangs; the slowest take a few on a quiet machine."""
SMALL = Plan(partition={"num_clients": 3}, engine="inline")
TRACE = "samples_per_second,down_mbps,up_mbps\n100,20,5\n"


@cache
def small_job() -> Job:
    return build_job(SMALL)


@cache
def owned_digits() -> Dataset:
    data = digits()
    return replace(data, owners=np.arange(data.num_train) % 20)


def context(family: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the caller of a family gives, beside the options."""
    if family == "models":
        return (), {"input_shape": (1, 28, 28), "num_classes": 10}
    if family in ("data.partition", "data.public"):
        return (owned_digits(),), {"seed": 0}
    if family == "data.skew":
        return (owned_digits(), iid(owned_digits(), num_clients=10)), {"seed": 0}
    if family == "privacy.mechanisms":
        return (), {"exposure": Exposure("poisson", 0.1, 1, 1.0, 1, 100)}
    if family == "engine":
        return (small_job(),), {"cohort": 3, "rounds": 1, "tell": unheard, "plan": SMALL}
    return (), {"seed": 0} if family in ("aggregators", "rounds.devices") else {}


def options_of(family: str, name: str) -> dict[str, Any]:
    args, given = context(family)
    hints = option_hints(find(family, name), len(args))
    ours = {option: hint for option, hint in hints.items() if option not in given or is_plain(hint)}
    return {option: hint for option, hint in ours.items() if family != "engine" or option not in given}


def example(family: str, name: str) -> dict[str, Any]:
    return examples(family, name)[0]


def kinds(hint: Any) -> list[Any]:
    """The alternatives of an annotation, without None."""
    base, _ = split(hint)
    alternatives = get_args(base) if get_origin(base) in (Union, UnionType) else [hint]
    return [each for each in alternatives if each is not type(None)]


def can_be(hint: Any, value: Any) -> bool:
    """Whether a value is of a kind, written down apart from the code that it tests; ranges are left to the caller."""
    base, _ = split(hint)
    if base is float:
        return type(value) in (int, float) and abs(value) < 1.8e308
    if base is int:
        return type(value) is int
    if get_origin(base) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(base))
    if get_origin(base) in (list, tuple):
        return value == [] or (type(value) is not list and any(can_be(get_args(base)[0], each) for each in [value]))
    return base is Part or type(value) is base


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"still building after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refuses(error: PlanError, owner: str, option: str, value: Any) -> None:
    """Check that a refusal names the part, the option, what was given, and what is allowed or what to do."""
    text = str(error)
    assert owner in text and option in text, text
    as_float = f"{value:g}" if type(value) is int and value < 1e300 else repr(value)
    assert repr(value)[:80] in text or as_float in text or value is True, text
    assert re.search(r"must|need|lower|at most|leave|set |choose|check|correct|is a|Known", text), text


@pytest.mark.parametrize(("family", "name"), PARTS, ids=[f"{family}.{name}" for family, name in PARTS])
def test_every_option_says_what_it_may_be(family: str, name: str) -> None:
    parameters = inspect.signature(find(family, name)).parameters
    for option, hint in options_of(family, name).items():
        assert all(is_plain(each) and split(each)[0] is not Any for each in kinds(hint)), f"{option}: {hint}"
        if parameters[option].default is inspect.Parameter.empty:
            assert option in example(family, name) or option in context(family)[1], f"{name} has no EXAMPLE of {option}"


@pytest.mark.parametrize(("family", "name"), PARTS, ids=[f"{family}.{name}" for family, name in PARTS])
def test_rubbish_is_refused_by_name_or_taken_as_it_is(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (each for each in example(family, name).values() if str(each).endswith(".csv")):
        Path(path).write_text(TRACE)
    args, given = context(family)
    size = getattr(sys.modules[find(family, name).__module__], "SIZE", "" if family == "data.catalog" else "none")
    fetches = size != "none"
    for option, hint in options_of(family, name).items():
        for value in RUBBISH.values():
            fits = [kind for kind in kinds(hint) if can_be(kind, value)]
            good = any(split(kind)[0] is bool or value in split(kind)[1] for kind in fits)
            accepted = good or any(split(kind)[0] not in (int, float) for kind in fits)
            if (accepted and fetches) or (good and option == "compile") or (accepted and name == "ray"):
                continue  # it would fetch data or a model, compile for a while, or begin a cluster
            try:
                with at_most(SECONDS):
                    built = Part(name, **{**example(family, name), option: value}).build(family, *args, **given)
            except PlanError as error:
                refuses(error, "" if hint is Part else name, option, value)
                continue
            if family == "engine":
                built.close()
            assert fits, f"{name} took {option} = {value!r}"
            numbers = [kind for kind in fits if split(kind)[0] in (int, float)]
            assert not numbers or any(value in split(kind)[1] for kind in numbers), f"{option} = {value!r}"
        with pytest.raises(PlanError, match=rf"{name}.*{option} is None: leave it out"):
            Part(name, **{option: None})


@pytest.mark.parametrize("section", [Local, Server, Evaluation, Stop, Attackers, Secagg, Eligibility, Plan])
def test_rubbish_in_a_table_is_refused_by_its_key(section: type[Section]) -> None:
    for field in fields(section):  # type: ignore[arg-type]
        for value in RUBBISH.values():
            try:
                found = getattr(section(**{field.name: value}), field.name)
            except PlanError as error:
                refuses(error, f"{section.key}.{field.name}".lstrip("."), field.name, value)
                continue
            assert isinstance(found, Part | Section | tuple) or found == (
                float(value) if isinstance(found, float) else value
            )
            if isinstance(found, float):
                assert math.isfinite(found)
