"""Random groups of clients. Shapes: C clients, M groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.seeds import generator


def group_shares(num: int, num_groups: int, seed: int, round_number: int) -> Tensor:
    """Divide clients into random groups whose sizes differ by at most one; return their shares in the means, (M, C).

    The groups depend only on the seed and the round number.
    """
    permutation = generator(seed, "groups of updates", round_number).permutation(num)
    share_MC = torch.zeros(num_groups, num, dtype=torch.float64)
    for group, members in enumerate(np.array_split(permutation, num_groups)):
        share_MC[group, torch.from_numpy(members)] = 1 / len(members)
    return share_MC
