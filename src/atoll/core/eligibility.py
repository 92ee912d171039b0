"""Which devices may be asked: a small rule on what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from atoll.core.options import NotNegative, Range
from atoll.core.section import Section


@dataclass(frozen=True, kw_only=True)
class Eligibility(Section, key="eligibility"):
    """What a device must be like to be asked (Bonawitz et al. 2019, arXiv:1902.01046, section 3); unset asks nothing.

    >>> Eligibility(charging=True, min_battery=0.5).why_not({"charging": True, "battery": 0.2})
    'battery is 0.2, the rule asks for at least 0.5'
    """

    idle: bool | None = None
    charging: bool | None = None
    unmetered: bool | None = None
    """Whether its network costs nothing by the byte."""
    min_battery: Annotated[float, Range(0, 1, hint="80 % is 0.8")] | None = None
    """Of the attribute `battery`, the share of a full one, in [0, 1]."""
    min_memory: NotNegative | None = None
    """Of the attribute `memory`, in MB."""

    def why_not(self, attributes: Mapping[str, float | bool]) -> str | None:
        """Why a device with these attributes may not be asked, in words; None if it may.

        An attribute that the rule needs and the device does not state counts against it.
        """
        asked = {
            "idle": self.idle,
            "charging": self.charging,
            "unmetered": self.unmetered,
            "battery": self.min_battery,
            "memory": self.min_memory,
        }
        for name, wanted in asked.items():
            if wanted is None:
                continue
            if name not in attributes:
                return f"{name} is not stated, and the rule asks for it"
            stated = attributes[name]
            if isinstance(wanted, bool) and stated != wanted:
                return f"{name} is {str(stated).lower()}, the rule asks for {str(wanted).lower()}"
            if not isinstance(wanted, bool) and not stated >= wanted:  # NaN is refused too
                return f"{name} is {stated:g}, the rule asks for at least {wanted:g}"
        return None
