"""Send an update of huge norm."""

from __future__ import annotations

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import Positive


def large_norm(norm: Positive = 1e6) -> Attack:
    """Scale the honest update to an L2 norm of `norm`: x norm / |x|; an update of zeros is not changed."""

    def update(honest: Update, known: Knowledge) -> Update:
        honest_norm = float(honest.delta_D.double().norm())
        return honest._replace(delta_D=honest.delta_D * (norm / honest_norm)) if honest_norm > 0 else honest

    return Attack(update=update, knows="its own update")
