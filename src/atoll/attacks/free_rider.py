"""Take the model and give nothing."""

from __future__ import annotations

import numpy as np
import torch

from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import Update


def free_rider(sigma: float = 1e-3, decay: float = 1.0) -> Attack:
    """Send back the model as it came, disguised by noise that shrinks with time: N(0, sigma^2) t^-decay.

    (Fraboni et al. 2021, arXiv:2006.11901, disguised free-riding by additive noise; sigma = 0 is the plain kind.) t
    counts attempts from 1. It claims the weight of an honest update.
    """
    if sigma < 0 or decay < 0:
        raise PlanError(f"free_rider.sigma and free_rider.decay must be 0 or more, got {sigma} and {decay}")

    def update(honest: Update, known: Knowledge) -> Update:
        noise_D = torch.from_numpy(known.rng.standard_normal(honest.delta_D.shape, dtype=np.float32))
        size = sigma * (known.attempt + 1) ** -decay
        aux = {name: torch.zeros_like(vector) for name, vector in honest.aux.items()}
        return honest._replace(delta_D=(size * noise_D).to(honest.delta_D.dtype), aux=aux)

    return Attack(update=update, knows="the model that was sent")
