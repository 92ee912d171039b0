"""Send something huge."""

from __future__ import annotations

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import Positive


def large_norm(norm: Positive = 1e6) -> Attack:
    """Stretch the honest update to an L2 norm of `norm`: x norm / |x|; one of zeros stays so."""

    def update(honest: Update, known: Knowledge) -> Update:
        length = float(honest.delta_D.double().norm())
        return honest._replace(delta_D=honest.delta_D * (norm / length)) if length > 0 else honest

    return Attack(update=update, knows="its own update")
