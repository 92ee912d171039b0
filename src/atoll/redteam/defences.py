"""Defences of a plan, and the same plan with one of them switched off or on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.probe import Sight

QUIET: dict[str, object] = {
    "evaluation.every": 0,
    "evaluation.clients_every": 0,
    "stop": {},
    "evaluation.new_clients": None,
}
"""Settings that let a run end with its rounds, and measure nothing: a server sees what clients send it."""


class Switch(NamedTuple):
    """A defence that can be switched off or on."""

    defence: str
    setting: str
    """How a plan sets it, as TOML."""
    changes: dict[str, object]
    """The settings that switch it."""
    off: bool
    base: Plan | None = None
    """The plan that it is switched in, where that is known."""


def quiet(plan: Plan) -> Plan:
    """Return a plan of which nothing is measured."""
    changes = dict(QUIET)
    if plan.evaluation.adapt_steps is not None:
        changes["evaluation.adapt_steps"] = None
    return plan.replace(changes)


def switches_off(plan: Plan) -> list[Switch]:
    """Return the defences that a plan has against whoever sees what its server sees."""
    found = list[Switch]()
    if plan.privacy is not None:
        setting = f"privacy = {toml_of(plan.privacy)}"
        found.append(Switch(f"{plan.privacy.name} noise and clip", setting, {"privacy": None}, True))
    if plan.secagg is not None:
        found.append(Switch("secure aggregation", "secagg = {}", {"secagg": None}, True))
    for place, part in enumerate(plan.uplink):
        rest = [other.to_dict() for number, other in enumerate(plan.uplink) if number != place]
        found.append(Switch(f"{part.name} on the uplink", f"uplink = [{toml_of(part)}]", {"uplink": rest}, True))
    return found


def switches_on(plan: Plan, sights: list[Sight]) -> list[Switch]:
    """Return defences that a plan does without: secure aggregation, and noise of clients on samples or updates."""
    found = list[Switch]()
    if plan.secagg is None:
        found.append(Switch("secure aggregation", "secagg = {}", {"secagg": {}}, False))
    if plan.privacy is None:
        norms = [float(norm) for sight in sights for norm in sight.rows.delta_D.double().norm(dim=1)]
        clip = float(f"{np.median(norms):.1g}") if norms and np.median(norms) > 0 else 1.0
        part = Part("local", clip=clip, sigma=1.0, delta=1e-5)
        name = "noise that clients add to updates"
        found.append(Switch(name, f"privacy = {toml_of(part)}", {"privacy": part.to_dict()}, False))
    return found


def toml_of(part: Part) -> str:
    """Return a part as an inline table."""
    pairs = [f"{name} = {_value(value)}" for name, value in part.to_dict().items()]
    return "{" + ", ".join(pairs) + "}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"
