"""Send the negated update."""

from __future__ import annotations

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update


def sign_flip(scale: float = 1.0) -> Attack:
    """Send -scale times the honest update (Li et al. 2019, arXiv:1811.03761, section 5)."""

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=-scale * honest.delta_D)

    return Attack(update=update, knows="its own update")
