"""Send NaN or infinity."""

from __future__ import annotations

from typing import Literal

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
EXAMPLES = [{"value": "nan"}, {"value": "inf"}]


def not_finite(value: Literal["nan", "inf", "-inf"] = "nan") -> Attack:
    """Put `nan`, `inf` or `-inf` into one random coordinate: one is enough to make a sum useless."""

    def update(honest: Update, known: Knowledge) -> Update:
        delta_D = honest.delta_D.clone()
        delta_D[int(known.rng.integers(delta_D.numel()))] = VALUES[value]
        return honest._replace(delta_D=delta_D)

    return Attack(update=update, knows="its own update", finite=False)
