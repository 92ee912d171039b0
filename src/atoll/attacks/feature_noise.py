"""Train on noisy features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.options import NotNegative


def feature_noise(sigma: NotNegative = 1.0) -> Attack:
    """Add Gaussian noise to the features, drawn anew for each batch: x + N(0, sigma^2). It is from no paper."""

    def data(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
        if not x.dtype.is_floating_point:
            raise PlanError(
                "feature_noise needs numeric features, which token data do not have: use gaussian, which alters updates"
            )
        noise = torch.from_numpy(known.rng.standard_normal(x.shape, dtype=np.float32))
        return x + sigma * noise.to(x.device), y

    return Attack(data=data, knows="its own data")
