"""The devices of a simulated federation."""

from __future__ import annotations

from atoll.checks.table import check
from atoll.checks.views import Simulated
from atoll.core.devices import INSTANT, Devices
from atoll.core.plan import Plan


def build_devices(plan: Plan) -> Devices:
    """What a simulation's devices are like; between organisations they are what they are."""
    check(Simulated(plan))
    if plan.devices is not None:
        devices: Devices = plan.devices.build("rounds.devices", seed=plan.seed)
        return devices
    return INSTANT
