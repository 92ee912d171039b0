"""Rules on engines: what a plan must be for workers that build it again in a process of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atoll.checks.rule import Rule, Values
from atoll.checks.views import Simulated
from atoll.core.plan import Plan

REBUILDING = ("ray",)
"""Engines whose workers build the job from the plan, and inherit no memory."""
UNNAMED = re.compile(r"__main__:|[\w.]+:[^<]*<")
"""What an object or a function is called that has no name of its own, or one that only its script knows."""


def unnamed(plan: Plan) -> list[tuple[str, str]]:
    """Return the keys and names of a plan's parts that only the script which made the plan can find.

    >>> unnamed(Plan(model="__main__:mine"))
    [('model', '__main__:mine')]
    """
    return [(key, name) for key, name in _texts(plan.to_dict(), "") if UNNAMED.match(name)]


def _texts(value: Any, key: str) -> list[tuple[str, str]]:
    """Return every text in a plan with its key."""
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, Mapping):
        return [pair for name, each in value.items() for pair in _texts(each, _below(key, name))]
    if isinstance(value, list | tuple):
        return [pair for each in value for pair in _texts(each, key)]
    return []


def _below(key: str, name: str) -> str:
    return key if name == "name" else f"{key}.{name}" if key else name


def rebuilds(plan: Plan) -> bool:
    """Return whether a plan's workers build the job from the plan: on other machines, on devices, or begun anew."""
    name, options = plan.engine.name, plan.engine.options
    on_device = not str(options.get("device", "cpu")).startswith("cpu")
    return name in REBUILDING or (name == "processes" and (on_device or bool(options.get("spawn"))))


def _hidden(view: Simulated) -> Values | None:
    found = unnamed(view.plan) if rebuilds(view.plan) else []
    return {"use": f"{found[0][0]} is '{found[0][1]}'"} if found else None


SIMULATED: tuple[Rule[Simulated], ...] = (
    Rule(
        name="workers-find-parts-by-name",
        parts=("engine",),
        reason="{use|a function or a data set of a script}, which workers of {engine|an engine of many machines} "
        "cannot find, since they build the plan in processes of their own",
        way_out="put it into a module beside the script and name it as 'module:function', or set "
        'engine = "processes"',
        finding=_hidden,
        refused=[
            {"engine": "ray", "model": "__main__:mine"},
            {"engine": "ray", "loss": "script:make.<locals>.loss"},
            {"engine": {"name": "processes", "spawn": True}, "model": "__main__:mine"},
        ],
        mended={"engine": "inline", "model": None, "loss": None},
    ),
)
