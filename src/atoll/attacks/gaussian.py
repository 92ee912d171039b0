"""Send noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import NotNegative


def gaussian(sigma: NotNegative = 1.0) -> Attack:
    """Send N(0, sigma^2) in every coordinate (Blanchard et al. 2017, arXiv:1703.02757, where sigma is 200)."""

    def update(honest: Update, known: Knowledge) -> Update:
        def noise(like: Tensor) -> Tensor:
            standard = torch.from_numpy(np.asarray(known.rng.standard_normal(like.shape, dtype=np.float32)))
            return (sigma * standard).to(like.dtype)

        delta_D = noise(honest.delta_D)
        return honest._replace(delta_D=delta_D, aux={name: noise(honest.aux[name]) for name in sorted(honest.aux)})

    return Attack(update=update, knows="the number of parameters")
