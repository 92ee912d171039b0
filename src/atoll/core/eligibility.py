"""Eligibility: a rule on the attributes of a device, which decides whether it may get tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from atoll.core.options import NotNegative, Range
from atoll.core.section import Section


@dataclass(frozen=True, kw_only=True)
class Eligibility(Section, key="eligibility"):
    """Requirements on a device (Bonawitz et al. 2019, arXiv:1902.01046, section 3); None requires nothing.

    >>> Eligibility(charging=True, min_battery=0.5).why_not({"charging": True, "battery": 0.2})
    'battery is 0.2, the rule asks for at least 0.5'
    """

    idle: bool | None = None
    charging: bool | None = None
    unmetered: bool | None = None
    """Whether its network is free of charge."""
    min_battery: Annotated[float, Range(0, 1, hint="80 % is 0.8")] | None = None
    """Minimum of the attribute `battery`, the share of a full charge, in [0, 1]."""
    min_memory: NotNegative | None = None
    """Minimum of the attribute `memory`, in MB."""

    def why_not(self, attributes: Mapping[str, float | bool]) -> str | None:
        """Return the reason why a device with these attributes is not eligible, or None if it is.

        A device that does not state a required attribute is not eligible.
        """
        required = {
            "idle": self.idle,
            "charging": self.charging,
            "unmetered": self.unmetered,
            "battery": self.min_battery,
            "memory": self.min_memory,
        }
        for name, value in required.items():
            if value is None:
                continue
            if name not in attributes:
                return f"{name} is not stated, and the rule asks for it"
            stated = attributes[name]
            if isinstance(value, bool) and stated != value:
                return f"{name} is {str(stated).lower()}, the rule asks for {str(value).lower()}"
            if not isinstance(value, bool) and not stated >= value:  # NaN is refused too
                return f"{name} is {stated:g}, the rule asks for at least {value:g}"
        return None


ANYBODY = Eligibility()
"""The rule that every device meets."""
