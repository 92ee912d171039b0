"""Claim a larger number of samples."""

from __future__ import annotations

from typing import Annotated

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import above


def weight_liar(
    factor: Annotated[float, above(0, "a negative weight is rejected at once")] = 100.0, scale: float = 1.0
) -> Attack:
    """Send the weight n_k factor, and `scale` times the honest update.

    Rules that weigh by n_k use the false weight; robust rules ignore weights.
    """

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=scale * honest.delta_D, weight=factor * honest.weight)

    return Attack(update=update, knows="its own update")
