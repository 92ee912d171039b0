"""The attack on the trimmed mean. Shapes: C clients, H honest ones, A bad ones, D parameters."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.attacks.crafting import ALL_UPDATES, replace_bad_rows
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import above


def fang(spread: Annotated[float, above(1)] = 2.0) -> Attack:
    """Send, in every coordinate, values just beyond the honest ones, on the side opposite to their mean.

    Where the honest mean is below 0: between the honest maximum M and b M, or M / b if M is negative. Elsewhere:
    between the minimum m and b m, or m / b if m is positive (Fang et al. 2020, arXiv:1911.11815, section 3.3, with full
    knowledge and b = 2, here `spread`). Each bad client draws its own values.
    """

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        def vectors(honest_HD: Tensor) -> Tensor:
            low_D, high_D = honest_HD.amin(0), honest_HD.amax(0)
            negative_D = honest_HD.mean(0) < 0
            near_D = torch.where(negative_D, high_D, low_D)
            outwards_D = torch.where(negative_D, high_D > 0, low_D < 0)
            far_D = torch.where(outwards_D, near_D * spread, near_D / spread)
            uniform_AD = known.rng.random((int(bad_C.sum()), len(near_D)), dtype=np.float32)
            return near_D + torch.from_numpy(uniform_AD).to(near_D.dtype) * (far_D - near_D)

        return replace_bad_rows(updates, bad_C, vectors)

    return Attack(collude=collude, knows=ALL_UPDATES)
