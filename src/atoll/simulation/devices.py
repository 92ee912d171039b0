"""The devices of a simulated federation."""

from __future__ import annotations

from atoll.core.devices import INSTANT, Devices
from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError
from atoll.core.plan import Plan


def build_devices(plan: Plan) -> Devices:
    """What a simulation's devices are like; between organisations they are what they are."""
    if plan.devices is not None:
        devices: Devices = plan.devices.build("rounds.devices", seed=plan.seed)
        return devices
    if plan.eligibility != Eligibility():
        raise PlanError("eligibility is a rule on devices, but the plan has none: set devices, e.g. to fleet")
    return INSTANT
