"""Send an update of zeros."""

from __future__ import annotations

import torch

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update


def zero() -> Attack:
    """Send a vector of zeros with the weight of an honest update, which shrinks the mean."""

    def update(honest: Update, known: Knowledge) -> Update:
        aux = {name: torch.zeros_like(vector) for name, vector in honest.aux.items()}
        return honest._replace(delta_D=torch.zeros_like(honest.delta_D), aux=aux)

    return Attack(update=update, knows="the number of parameters")
