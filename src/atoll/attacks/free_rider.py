"""Send noise instead of training."""

from __future__ import annotations

import numpy as np
import torch

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import NotNegative


def free_rider(sigma: NotNegative = 1e-3, decay: NotNegative = 1.0) -> Attack:
    """Send back the unchanged model, disguised by noise that decreases with time: N(0, sigma^2) t^-decay.

    (Fraboni et al. 2021, arXiv:2006.11901, disguised free-riding by additive noise; sigma = 0 is plain free-riding.) t
    counts attempts from 1. The weight is that of an honest update.
    """

    def update(honest: Update, known: Knowledge) -> Update:
        noise_D = torch.from_numpy(known.rng.standard_normal(honest.delta_D.shape, dtype=np.float32))
        scale = sigma * (known.attempt + 1) ** -decay
        aux = {name: torch.zeros_like(vector) for name, vector in honest.aux.items()}
        return honest._replace(delta_D=(scale * noise_D).to(honest.delta_D.dtype), aux=aux)

    return Attack(update=update, knows="the model that was sent")
