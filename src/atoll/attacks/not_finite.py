"""Send what is no number."""

from __future__ import annotations

from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError, nearest
from atoll.core.messages import Update

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def not_finite(value: str = "nan") -> Attack:
    """Put `nan`, `inf` or `-inf` into one coordinate, picked at random: one is enough to spoil a sum."""
    if value not in VALUES:
        raise PlanError(f"not_finite.value cannot be {value!r}: {nearest(value, VALUES)}")

    def update(honest: Update, known: Knowledge) -> Update:
        delta_D = honest.delta_D.clone()
        delta_D[int(known.rng.integers(delta_D.numel()))] = VALUES[value]
        return honest._replace(delta_D=delta_D)

    return Attack(update=update, knows="its own update")
