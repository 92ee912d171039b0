"""Claim more samples."""

from __future__ import annotations

from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import Update


def weight_liar(factor: float = 100.0, scale: float = 1.0) -> Attack:
    """Claim `factor` times as many samples, n_k factor, and send `scale` times the honest update.

    Rules that weigh by n_k believe it; those of the robust kind ignore weights.
    """
    if not factor > 0:
        raise PlanError(f"weight_liar.factor must be above 0, got {factor}: a negative weight is rejected at once")

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=scale * honest.delta_D, weight=factor * honest.weight)

    return Attack(update=update, knows="its own update")
